// The completion scripts, each in its shell.
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>

#include <filesystem>
#include <sstream>

#include "launch/launcher.h"
#include "launch/on_terminal.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::UnorderedElementsAre;

bool has_program(const std::string& name) {
  return run_program({"sh", "-c", "command -v " + name}).exit_code == 0;
}

const std::string kBashCompletion = "/usr/share/bash-completion/bash_completion";

/// Types lines at a shell's prompt, in a folder with the file "notes.txt" and the folder "logs".
/// `setup` makes Ctrl-X print the line as {{N:line}}N, the Nth time, and clear it.
class Shell {
 public:
  Shell(const std::vector<std::string>& argv, const std::string& kind, const std::string& setup)
      : terminal_(with_environment(argv, folder_)) {
    folder_.write("notes.txt", "");
    std::filesystem::create_directory(folder_ / "logs");
    folder_.write("_syncbn-launch", run_program({kLauncher, "--completion", kind}).out);
    terminal_.type("cd " + folder_.path().string() + "; " + setup + "; echo rea''dy\n");
    terminal_.shows("ready");
  }

  /// Returns the line after pressing Tab.
  std::string after_tab(const std::string& line) {
    terminal_.type(line + "\t\x18");
    ++lines_;
    const std::string start = "{{" + std::to_string(lines_) + ":";
    if (!terminal_.shows(start) || !terminal_.shows("}}" + std::to_string(lines_))) return "";
    const std::string& screen = terminal_.screen();
    const size_t begin = screen.rfind(start) + start.size();
    return screen.substr(begin, screen.rfind("}}") - begin);
  }

 private:
  static std::vector<std::string> with_environment(const std::vector<std::string>& argv,
                                                   const TempFolder& home) {
    std::vector<std::string> words{"/usr/bin/env", "HOME=" + home.path().string(), "PS1=> "};
    words.insert(words.end(), argv.begin(), argv.end());
    return words;
  }

  TempFolder folder_;
  OnTerminal terminal_;
  int lines_ = 0;
};

/// Checks the line that bash's readline itself reports.
class BashCompletionTest : public ::testing::Test {
 protected:
  static std::string shown() {
    return R"(bind -x '"\C-x": printf "{{%d:%s}}%d\n" $((++n)) "$READLINE_LINE" $n; READLINE_LINE=')"
           "; bind 'set bell-style none'; source ./_syncbn-launch";
  }

  /// All completions for a line with the cursor at its end.
  static std::vector<std::string> offered(const std::string& line, const std::string& before = "") {
    const std::string script =
        before +
        "\nsource /dev/stdin <<<\"$SCRIPT\"\nCOMP_LINE=$LINE COMP_POINT=${#LINE} "
        "COMP_WORDBREAKS=$' \\t\\n\"\\'><=;|&(:'\n"
        "mapfile -t COMP_WORDS <<<\"$WORDS\"\nCOMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        "_syncbn_launch\nprintf '%s\\n' \"${COMPREPLY[@]}\"";
    const auto result =
        run_program({"bash", "-c", script},
                    {.env = {{"SCRIPT", run_program({kLauncher, "--completion=bash"}).out},
                             {"LINE", line},
                             {"WORDS", as_bash_splits(line)}}});
    EXPECT_EQ(result.err, "");
    std::vector<std::string> words;
    std::istringstream lines(result.out);
    for (std::string word; std::getline(lines, word);) {
      if (!word.empty()) words.push_back(word);
    }
    return words;
  }

 private:
  /// One word per line; = and : are separate words.
  static std::string as_bash_splits(const std::string& line) {
    std::string words;
    for (size_t i = 0; i < line.size(); ++i) {
      const bool parts = line[i] == '=' || line[i] == ':';
      if (line[i] == ' ') {
        words += '\n';
      } else if (parts) {
        words += std::string(words.back() == '\n' ? "" : "\n") + line[i];
        if (i + 1 < line.size() && line[i + 1] != ' ') words += '\n';
      } else {
        words += line[i];
      }
    }
    return words;
  }
};

TEST_F(BashCompletionTest, OffersOptionsAsTheyAreTyped) {
  EXPECT_THAT(offered("syncbn-launch --nn"), ElementsAre("--nnodes"));
  EXPECT_THAT(offered("syncbn-launch --n"),
              IsSupersetOf({"--nnodes", "--node_rank", "--nproc_per_node"}));
  EXPECT_THAT(offered("syncbn-launch --nproc-p"), ElementsAre("--nproc-per-node"));
  EXPECT_THAT(offered("syncbn-launch --standalone --node_rank 3 --dr"), ElementsAre("--dry_run"));
  EXPECT_THAT(offered("syncbn-launch --no-such"), IsEmpty());
}

TEST_F(BashCompletionTest, OffersTheChoicesOfAnOption) {
  EXPECT_THAT(offered("syncbn-launch --rdzv_backend "), UnorderedElementsAre("static", "c10d"));
  EXPECT_THAT(offered("syncbn-launch --rdzv-backend=c"), ElementsAre("c10d"));
  EXPECT_THAT(offered("syncbn-launch --rdzv_b="), UnorderedElementsAre("static", "c10d"));
  EXPECT_THAT(offered("syncbn-launch --nproc_per_node g"), ElementsAre("gpu"));
  EXPECT_THAT(offered("syncbn-launch --numa_binding=ex"), ElementsAre("exclusive"));
  EXPECT_THAT(offered("syncbn-launch --node_rank "), IsEmpty());
  EXPECT_THAT(offered("syncbn-launch --help a"), UnorderedElementsAre("all", "accepted", "about"));
  EXPECT_THAT(offered("syncbn-launch --help="), IsEmpty());
}

TEST_F(BashCompletionTest, FindsTheProgramBehindTheOptions) {
  const std::string program =
      R"(_of_program() { COMPREPLY=("words:${COMP_WORDS[*]}:$COMP_CWORD:$2"); }
complete -F _of_program prog)";
  for (const char* options :
       {"", "--nnodes 2 ", "--nnodes=2 ", "--rdzv_endpoint host:29400 ", "-r 3 -t3 ", "-t 0:3,1:2 ",
        "--standalone --rdzv-e=[::1]:5 ", "--standalone=true ", "--nnodes 1 -- ", "--nn 2 "}) {
    EXPECT_THAT(offered(std::string("syncbn-launch ") + options + "prog --x=1 fi", program),
                ElementsAre("words:prog --x = 1 fi:4:fi"))
        << options;
  }
  EXPECT_THAT(offered("syncbn-launch --nnodes prog", program), IsEmpty()) << "that is a value";
}

TEST_F(BashCompletionTest, OffersProgramsAndFilesInTheProgramsPlace) {
  EXPECT_THAT(offered("syncbn-launch --standalone mkfif"),
              AllOf(Contains("mkfifo"), Each("mkfifo")));
  EXPECT_THAT(offered("syncbn-launch /usr/bin/mkfif"), Contains("/usr/bin/mkfifo"));
  EXPECT_THAT(offered("syncbn-launch -- --n"), IsEmpty());
}

TEST_F(BashCompletionTest, WorksAtAPrompt) {
  Shell bash({"/bin/bash", "--norc", "--noprofile", "-i"}, "bash", shown());
  EXPECT_EQ(bash.after_tab("syncbn-launch --rdzv_ba"), "syncbn-launch --rdzv_backend ");
  EXPECT_EQ(bash.after_tab("syncbn-launch --rdzv-backend=c"), "syncbn-launch --rdzv-backend=c10d ");
  EXPECT_EQ(bash.after_tab("syncbn-launch --numa-b"), "syncbn-launch --numa-binding ");
  EXPECT_EQ(bash.after_tab("syncbn-launch --log_dir lo"), "syncbn-launch --log_dir logs/");
  EXPECT_EQ(bash.after_tab("syncbn-launch --report=no"), "syncbn-launch --report=notes.txt ");
  EXPECT_EQ(bash.after_tab("syncbn-launch --nnodes 2 mkfif"), "syncbn-launch --nnodes 2 mkfifo ");
  EXPECT_EQ(bash.after_tab("syncbn-launch -t 0:3 cat no"), "syncbn-launch -t 0:3 cat notes.txt ");
}

TEST_F(BashCompletionTest, LeavesTheProgramsWordsToBashCompletion) {
  SYNCBN_SKIP_UNLESS(std::filesystem::exists(kBashCompletion), "bash-completion");
  Shell bash({"/bin/bash", "--norc", "--noprofile", "-i"}, "bash",
             "source " + kBashCompletion + "; " + shown());
  EXPECT_EQ(bash.after_tab("syncbn-launch -t 0:3 cat --number-non"),
            "syncbn-launch -t 0:3 cat --number-nonblank ");
  EXPECT_EQ(bash.after_tab("syncbn-launch --rdzv-backend=c"), "syncbn-launch --rdzv-backend=c10d ");
}

TEST(ZshCompletionTest, WorksAtAPrompt) {
  SYNCBN_SKIP_UNLESS(has_program("zsh"), "zsh");
  Shell zsh(
      {"/usr/bin/env", "zsh", "-f", "-i"}, "zsh",
      "fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; setopt nobeep nolistambiguous; "
      "dump() { zle -I; print -r -- \"{{$((++n)):$BUFFER}}$n\"; BUFFER= }; zle -N dump; bindkey "
      "'^X' dump");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --rdzv_ba"), "syncbn-launch --rdzv_backend=");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --rdzv_backend=c"), "syncbn-launch --rdzv_backend=c10d ");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --rdzv-backend c"), "syncbn-launch --rdzv-backend c10d ");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --numa-b"), "syncbn-launch --numa-binding=");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --log_dir lo"), "syncbn-launch --log_dir logs/");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --report no"), "syncbn-launch --report notes.txt ");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --nnodes 2 mkfif"), "syncbn-launch --nnodes 2 mkfifo ");
  EXPECT_EQ(zsh.after_tab("syncbn-launch -t 0:3 cat no"), "syncbn-launch -t 0:3 cat notes.txt ");
  EXPECT_EQ(zsh.after_tab("syncbn-launch --standalone cat --rdzv_ba"),
            "syncbn-launch --standalone cat --rdzv_ba");
}

TEST(CompletionTest, RefusesOtherShells) {
  const auto result = run_program({kLauncher, "--completion=fish"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(count(result.err, "expected one of bash, zsh"), 1) << result.err;
}

}  // namespace
}  // namespace syncbn::test
