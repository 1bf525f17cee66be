#include "workers/program.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/log.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <regex>
#include <sstream>

#include "common/descriptors.h"
#include "common/words.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error) && !fs::is_directory(path, error);
}

bool is_executable(const fs::path& path) {
  return is_file(path) && ::access(path.c_str(), X_OK) == 0;
}

// The folders in a variable such as PATH.
std::vector<fs::path> folders_in(const char* variable, const char* default_value) {
  std::vector<fs::path> folders;
  std::istringstream path(base::env(variable).value_or(default_value));
  // An empty entry is the current folder.
  for (std::string folder; std::getline(path, folder, ':');) {
    folders.emplace_back(folder.empty() ? "." : folder);
  }
  return folders;
}

std::vector<fs::path> path_folders() {
  return folders_in("PATH", "/usr/local/bin:/usr/bin:/bin");
}

std::string expanded(const std::string& word, const std::string& local_rank) {
  static const std::regex kName(R"re(\$(\$|local_rank\b|\{local_rank\}))re");
  std::string result;
  auto rest = word.begin();
  for (std::sregex_iterator found(word.begin(), word.end(), kName), end; found != end; ++found) {
    result.append(rest, (*found)[0].first) += *found->begin() == "$$" ? "$" : local_rank;
    rest = (*found)[0].second;
  }
  return result.append(rest, word.end());
}

bool is_python_script(const std::string& name) {
  return fs::path(name).extension() == ".py";
}

// Whether the script contains the option's name in quotes.
bool declares(const std::string& script, const std::string& option) {
  return script.find(fmt::format("\"{}\"", option)) != std::string::npos ||
         script.find(fmt::format("'{}'", option)) != std::string::npos;
}

constexpr std::array kRankOptions{"--local_rank", "--local-rank"};

// The beginning of a regular file; empty if it cannot be read. Pipes are not read: the program
// needs their content.
std::string text_of(const fs::path& path, size_t max_bytes = 1 << 20) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return "";
  return read_at(base::open_to_read(path).get(), 0, max_bytes);
}

// A script without its comments and the texts in triple quotes.
std::string code_of(const std::string& script) {
  std::string code;
  for (size_t at = 0, end = 0; at < script.size(); at = end) {
    const char c = script[at];
    bool is_kept = c != '#';
    end = is_kept ? at + 1 : std::min(script.find('\n', at), script.size());
    if (c == '"' || c == '\'') {
      const std::string quotes(script.compare(at, 3, std::string(3, c)) == 0 ? 3 : 1, c);
      is_kept = quotes.size() == 1;
      end = at + quotes.size();
      while (end < script.size() && script.compare(end, quotes.size(), quotes) != 0 &&
             !(is_kept && script[end] == '\n')) {
        end += script[end] == '\\' ? 2 : 1;
      }
      end = std::min(end + quotes.size(), script.size());
    }
    if (is_kept) code.append(script, at, end - at);
  }
  return code;
}

// Whether Python runs the file: NAME.py, or one that begins with #! and Python.
bool is_script(const fs::path& path) {
  static const std::regex kInterpreter("#![^\n]*(python|pypy)");
  constexpr size_t kLine = 128;
  return is_python_script(path) || std::regex_search(text_of(path, kLine), kInterpreter,
                                                     std::regex_constants::match_continuous);
}

bool is_python(const std::string& word) {
  static const std::regex kName("(python|pypy)[0-9.]*t?");
  return std::regex_match(fs::path(word).filename().string(), kName) ||
         word == base::env("PYTHON_EXEC");
}

// What `python -m NAME` runs; empty if that is neither in this folder nor in PYTHONPATH.
fs::path file_of_module(std::string name) {
  std::ranges::replace(name, '.', '/');
  std::vector<fs::path> folders = folders_in("PYTHONPATH", "");
  folders.insert(folders.begin(), "");
  for (const fs::path& folder : folders) {
    for (const fs::path& file : {folder / (name + ".py"), folder / name / "__main__.py"}) {
      if (is_file(file)) return file;
    }
  }
  return "";
}

// A Python script among the words of a command.
struct Script {
  size_t word;  // the index of its name, or of its module's
  std::string name;
  std::string code;  // code_of() its text; empty if it cannot be read
};

std::optional<Script> find_script_of_python(const std::vector<std::string>& words, size_t python) {
  for (size_t i = python + 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.starts_with('-') || word == "-") {  // "-": stdin
      return Script{i, word, code_of(text_of(word))};
    }
    // An option with a value, which may be the rest of its word, as in -Wignore and -um NAME.
    const size_t letter = word.starts_with("--") ? word.npos : word.find_first_of("cmWX");
    if (letter == word.npos) continue;
    std::string value = word.substr(letter + 1);
    if (value.empty() && ++i < words.size()) value = words[i];
    if (i == words.size()) break;
    if (word[letter] == 'm') return Script{i, value, code_of(text_of(file_of_module(value)))};
    // Code that runs another script, as that of --run_path does, finds it in the next word.
    const bool runs_other = value.find("runpy") != value.npos;
    if (word[letter] == 'c' && !runs_other) return Script{i, "-c", ""};
  }
  return std::nullopt;
}

// Finds the script that a command runs itself, or through others, as in `env X=1 python3 -u s.py`.
// Without a word for Python, only a script that declares an option for the local rank counts.
std::optional<Script> find_script(const Command& command) {
  const std::vector<std::string>& words = command.argv;
  for (size_t i = 0; i < words.size(); ++i) {
    if (is_python(words[i])) return find_script_of_python(words, i);
    const std::string& file = i == 0 ? command.file : words[i];
    Script script{i, words[i], is_script(file) ? code_of(text_of(file)) : ""};
    const auto is_declared = [&](const char* name) { return declares(script.code, name); };
    if (std::ranges::any_of(kRankOptions, is_declared)) return script;
  }
  return std::nullopt;
}

// Whether the script looks LOCAL_RANK up, as in os.environ["LOCAL_RANK"], or tests whether it is
// set. Code that sets, deletes or prints it does not count, and neither do texts, such as a line of
// a print over several.
bool uses_local_rank(const std::string& code) {
  static const std::regex kAlias(R"re(\b(\w{1,64}) *= *(os\.)?environ(\.copy\(\))?\s*([;,)]|$))re");
  static const std::regex kUse(
      R"re(\b(environ *\[|environ\.get\(|getenv\() *['"]LOCAL_RANK['"](?!\] *=[^=]))re"
      R"re(|['"]LOCAL_RANK['"] (not )?in )re");
  static const std::regex kNoUse(R"re((\bdel |print\(|logg|warn\(|help=).*(environ|getenv))re"
                                 R"re(|^\s*r?("[^"]*|'[^']*)(environ|getenv))re");
  std::string names = "environ";  // and its aliases, as alternatives
  std::istringstream lines(code);
  for (std::string line; std::getline(lines, line);) {
    std::smatch alias;
    if (line.find("environ") != line.npos && std::regex_search(line, alias, kAlias)) {
      names.append("|").append(alias.str(1));
    }
    if (line.find("LOCAL_RANK") == line.npos) continue;
    line = std::regex_replace(line, std::regex(fmt::format(R"re(\b({})(?= *\[|\.get))re", names)),
                              "environ");
    if (std::regex_search(line, kUse) && !std::regex_search(line, kNoUse)) return true;
  }
  return false;
}

bool is_given(const LaunchOptions& options, const std::string& option) {
  return std::ranges::any_of(options.given, [&](const std::string& one) {
    return one.substr(0, one.find('=')) == option;
  });
}

// torch.distributed.launch has passed --local-rank since PyTorch 2.0. Before, it passed
// --local_rank, which is what most scripts declare.
std::string local_rank_arg(const LaunchOptions& options, const std::string& code) {
  if (options.local_rank_arg.empty() || is_given(options, "--local_rank_arg")) {
    return options.local_rank_arg;
  }
  const bool underscore = declares(code, "--local_rank") && !declares(code, "--local-rank");
  return underscore ? "--local_rank" : options.local_rank_arg;
}

// Like torchrun's sys.executable: if the launcher was called through a link in a virtual
// environment, that environment's Python.
std::string python(const LaunchOptions& options) {
  if (const auto chosen = base::env("PYTHON_EXEC")) return *chosen;
  const fs::path called_as = options.called_as;
  std::vector<fs::path> folders{called_as.parent_path()};
  if (folders.front().empty()) folders = path_folders();
  const auto found = std::ranges::find_if(folders, [&](const fs::path& folder) {
    return is_executable(folder / called_as.filename());
  });
  const bool is_there = found != folders.end() && is_executable(*found / "python3");
  return is_there ? *found / "python3" : fs::path("python3");
}

std::string find_python(const std::string& name) {
  try {
    return find_program(name);
  } catch (const ProgramError& error) {
    if (!base::env("PYTHON_EXEC")) throw;
    throw ProgramError(fmt::format("environment variable PYTHON_EXEC={}: {}", name, error.what()),
                       error.exit_code());
  }
}

std::string node_comment(const LaunchOptions& options, const RunContext& context) {
  const int workers = options.nproc_per_node;
  const int first = context.ranks.base;
  const std::string ranks = workers == 1
                                ? fmt::format("rank {}", first)
                                : fmt::format("ranks {} to {}", first, first + workers - 1);
  std::string line = fmt::format("# node {} of {}, host {}: {}, {} of {}", context.node,
                                 context.nodes, base::hostname(), base::counted(workers, "worker"),
                                 ranks, context.ranks.world_size);
  if (context.nodes > 1) {
    line += fmt::format(" (if {} nodes take part, each with --nproc_per_node={} as this one{})",
                        context.nodes, workers,
                        options.node_rank < 0 ? ", which is taken for the first" : "");
  }
  return line + "\n";
}

std::string assignments(const Variables& variables) {
  std::string text;
  for (const auto& [name, value] : variables) {
    text += fmt::format("{}={} ", name, shell_quoted({value}));
  }
  return text;
}

}  // namespace

std::string find_program(const std::string& name) {
  const bool is_path = name.find('/') != std::string::npos;
  std::vector<fs::path> folders{""};
  if (!is_path) {
    folders = path_folders();
    folders.insert(folders.begin(), base::program_file().parent_path());
  }
  for (const fs::path& folder : folders) {
    if (is_executable(folder / name)) return folder / name;
  }
  for (const fs::path& folder : folders) {
    if (!is_file(folder / name)) continue;
    constexpr std::array kSources = {".c", ".cc", ".cpp", ".cu", ".cxx", ".go", ".h", ".rs"};
    if (std::ranges::count(kSources, fs::path(name).extension()) > 0) {
      throw ProgramError(
          (folder / name).string() + " is a source file; build it, and name the program it becomes",
          base::kExitCannotExecute);
    }
    throw ProgramError(
        fmt::format("{} is not executable; chmod +x it, or name its interpreter before it",
                    (folder / name).string()),
        base::kExitCannotExecute);
  }
  std::error_code error;
  if (is_path && fs::is_directory(name, error)) {
    throw ProgramError(name + " is a folder, not a program", base::kExitCannotExecute);
  }
  if (is_path) {
    throw ProgramError("program not found: " + (base::is_missing(name)
                                                    ? "there is no file " + name
                                                    : fmt::format("{}: {}", name, error.message())),
                       base::kExitNotFound);
  }
  std::vector<std::string> beside;
  for (const auto& entry : fs::directory_iterator(folders.front(), error)) {
    if (is_executable(entry.path())) beside.push_back(entry.path().filename());
  }
  std::string hint = base::did_you_mean(name, beside);
  if (is_file(name)) hint = fmt::format("; to run the file in this folder, write ./{}", name);
  throw ProgramError(fmt::format("program '{}' not found beside syncbn-launch ({}) nor in PATH{}",
                                 name, folders.front().string(), hint),
                     base::kExitNotFound);
}

std::string local_rank_warning(const LaunchOptions& options, const Command& command) {
  if (!options.local_rank_arg.empty() || is_given(options, "--use_env")) return "";
  const auto script = find_script(command);
  if (!script || uses_local_rank(script->code)) return "";
  for (const char* name : kRankOptions) {
    if (std::ranges::any_of(command.argv, [&](const auto& word) { return word.starts_with(name); }))
      return "";
    if (!declares(script->code, name)) continue;
    return fmt::format(
        "{} declares {} and does not get it: start with --no_use_env, or read LOCAL_RANK from the "
        "environment",
        script->name, name);
  }
  return "";
}

std::vector<std::string> worker_argv(const Command& command, int local_rank) {
  const std::string rank = std::to_string(local_rank);
  std::vector<std::string> argv = command.argv;
  const auto first = argv.begin() + static_cast<std::ptrdiff_t>(command.first_argument);
  for (auto word = first; word != argv.end(); ++word) *word = expanded(*word, rank);
  if (!command.local_rank_arg.empty()) {
    argv.insert(argv.begin() + static_cast<std::ptrdiff_t>(command.local_rank_at),
                fmt::format("{}={}", command.local_rank_arg, rank));
  }
  return argv;
}

Command resolve_program(const LaunchOptions& options) {
  // runpy.run_path with the script's own name and arguments in sys.argv.
  constexpr const char* kRunPath =
      "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')";
  const std::string& name = options.program.front();
  Command command;
  if (options.module || options.run_path || (is_python_script(name) && !options.no_python)) {
    const bool is_module = options.module && !options.run_path;  // run_path wins, as in torchrun
    if (!is_module && !is_file(name)) {
      throw ProgramError("program not found: there is no Python script " + name,
                         base::kExitNotFound);
    }
    command.argv = {python(options), "-u"};
    command.file = find_python(command.argv.front());
    if (options.run_path) command.argv.insert(command.argv.end(), {"-c", kRunPath});
    if (is_module) command.argv.emplace_back("-m");
  } else {
    command.file = find_program(name);
  }
  command.first_argument = command.argv.size() + 1;
  command.argv.insert(command.argv.end(), options.program.begin(), options.program.end());
  command.local_rank_at = command.first_argument;
  if (!options.local_rank_arg.empty()) {
    const auto script = find_script(command);
    command.local_rank_arg = local_rank_arg(options, script ? script->code : "");
    if (script) command.local_rank_at = script->word + 1;
  }
  return command;
}

void check_arguments(const Command& command, const Variables& variables) {
  std::error_code error;
  const fs::path train = base::program_file().parent_path() / "train";
  if (!fs::equivalent(command.file, train, error)) return;
  std::vector<std::string> argv = worker_argv(command, 0);
  argv.front() = "--check_options";
  argv.insert(argv.begin(), command.file);
  // A pipe, such as a shell's <(...), or a terminal can be read only once: by the run.
  for (const std::string& word : argv) {
    if (fs::is_other(fs::status(word.substr(word.find('=') + 1), error))) return;
  }
  const std::string line = fmt::format("{}exec timeout 30 {} 2>&1 >/dev/null",
                                       assignments(variables), shell_quoted(argv));
  const auto [exit_code, said] = base::run_shell(line);
  if (exit_code == base::kExitUsage) throw ProgramError(said, exit_code);
  // Lines of SYNCBN_LOG, of the dynamic loader and of plug-ins are not for this launcher.
  std::istringstream lines(said);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("train: warning: ")) continue;
    base::write_stderr(fmt::format("syncbn-launch: {}\n", line.substr(line.find("warning: "))));
  }
}

std::string render_plan(const LaunchOptions& options, const RunContext& context,
                        const Command& command) {
  const int nproc = options.nproc_per_node;
  Variables common = worker_variables(options, context, 0);
  for (int local_rank = 1; local_rank < nproc; ++local_rank) {
    const Variables other = worker_variables(options, context, local_rank);
    std::erase_if(common, [&](const auto& entry) { return other.at(entry.first) != entry.second; });
  }
  std::string text = node_comment(options, context) + "export " + assignments(common);
  text.back() = '\n';
  for (int local_rank = 0; local_rank < nproc; ++local_rank) {
    Variables own = worker_variables(options, context, local_rank);
    std::erase_if(own, [&](const auto& entry) { return common.contains(entry.first); });
    std::vector<std::string> argv = worker_argv(command, local_rank);
    argv.front() = command.file;
    text += fmt::format("# rank {}, local rank {}", context.ranks.base + local_rank, local_rank);
    if (!context.cpus.empty()) {
      const std::string cpus = format_cpus(context.cpus[static_cast<size_t>(local_rank)]);
      text += ", CPU " + cpus;
      argv.insert(argv.begin(), {"taskset", "-c", cpus});
    }
    text += fmt::format("\n{}{}\n", assignments(own), shell_quoted(argv));
  }
  return text;
}

}  // namespace syncbn::launch
