// The completion scripts, each in its shell.
#include <gmock/gmock.h>

#include <filesystem>

#include "launch/launcher.h"
#include "launch/on_terminal.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

/// Types lines at a shell's prompt, in a folder with the file "notes.txt" and the folder "logs".
/// `setup` makes Ctrl-X print the line as {{N:line}}N, the Nth time, and clear it.
class Shell {
 public:
  Shell(const Words& argv, const std::string& kind, const std::string& setup)
      : terminal_(Words{"/usr/bin/env", "HOME=" + folder_.path().string(), "PS1=> "} + argv) {
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
  TempFolder folder_;
  OnTerminal terminal_;
  int lines_ = 0;
};

void completes_options_and_files(Shell shell) {
  EXPECT_EQ(shell.after_tab("syncbn-launch --rdzv_ba"), "syncbn-launch --rdzv_backend ");
  EXPECT_EQ(shell.after_tab("syncbn-launch --log_dir lo"), "syncbn-launch --log_dir logs/");
  EXPECT_EQ(shell.after_tab("syncbn-launch --nnodes 2 cat no"),
            "syncbn-launch --nnodes 2 cat notes.txt ");
}

TEST(CompletionTest, BashCompletesOptionsAndFiles) {
  completes_options_and_files(
      {{"/bin/bash", "--norc", "--noprofile", "-i"},
       "bash",
       R"(bind -x '"\C-x": printf "{{%d:%s}}%d\n" $((++n)) "$READLINE_LINE" $n; READLINE_LINE=')"
       "; bind 'set bell-style none'; source ./_syncbn-launch"});
}

TEST(CompletionTest, ZshCompletesOptionsAndFiles) {
  SYNCBN_SKIP_UNLESS(run_program({"sh", "-c", "command -v zsh"}).exit_code == 0, "zsh");
  completes_options_and_files(
      {{"zsh", "-f", "-i"},
       "zsh",
       "fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; setopt nobeep nolistambiguous; "
       "dump() { zle -I; print -r -- \"{{$((++n)):$BUFFER}}$n\"; BUFFER= }; zle -N dump; bindkey "
       "'^X' dump"});
}

}  // namespace
}  // namespace syncbn::test
