#include "commands/commands.h"

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "checkpoints/resume.h"
#include "commands/launching.h"
#include "commands/program_options.h"
#include "commands/resolved_config.h"
#include "commands/sweep_plan.h"
#include "commands/sweep_table.h"
#include "records/folder_lock.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTable = "sweep.csv";

/// A run of the sweep.
struct Run {
  SweepResult result;
  std::vector<std::string> command = {};  ///< the arguments of train
  bool is_finished = false;
  bool overwrites = false;
};

// ---- before the first run -----------------------------------------------------------------------

void refuse_what_cannot_be(const LaunchRequest& request) {
  if (base::env("RANK")) {
    throw base::UserError(
        "sweep: this process is a rank already (RANK is set); start train sweep without a "
        "launcher, with --nproc_per_node=N for the ranks of each run");
  }
  for (const std::string& option : request.launcher) {
    const std::string name = option.substr(0, option.find('='));
    for (const char* of_nodes : {"--nnodes", "--node_rank", "--master_", "--rdzv_"}) {
      if (!name.starts_with(of_nodes)) continue;
      throw base::UserError(
          fmt::format("sweep: {} is not possible; a sweep runs on one node", name));
    }
    if (!request.asks) {
      throw base::UserError(fmt::format("sweep: {} needs --nproc_per_node=N as well", name));
    }
  }
}

/// Keys that limit the length of a run.
bool is_limit(const std::string& key) {
  return key == "epochs" || key == "max_steps" || key.starts_with("early_stop.");
}

/// Whether the run in `folder` is this one and has finished.
/// @throws base::UserError when it is another one.
bool is_finished(const fs::path& folder, const ResolvedConfig& resolved) {
  const auto text = run_files::config_of(folder);
  if (!text) return false;
  const config::Value former = config::parse_yaml(*text, folder.string());
  config::Value now = config::parse_yaml(resolved.text, resolved.name);
  const config::Value* const seed = former.find("seed");
  if (seed == nullptr) {
    throw base::UserError(fmt::format("sweep: the config.yaml in {} is damaged; remove that folder",
                                      folder.string()));
  }
  // The seed was drawn when the run began.
  if (!resolved.config.seed) now.set("seed", *seed);
  const std::string advice = "choose another run_dir, or make all runs anew with --overwrite";
  std::vector<std::string> changed;
  try {
    changed = changed_settings(former, now);
  } catch (const base::UserError&) {
    changed = {"optimizer.type"};
  }
  if (!changed.empty()) {
    throw base::UserError(fmt::format("sweep: {} holds a run with other settings: now {}; {}",
                                      folder.string(), base::join(changed, ", "), advice));
  }
  if (!run_files::has_result(folder)) return false;
  return std::ranges::none_of(config::changes(former, now), is_limit, &config::Change::path);
}

/// Adds the lines that `lines` lacks.
void add_lines(const std::string& text, std::vector<std::string>& lines) {
  std::istringstream all(text);
  for (std::string line; std::getline(all >> std::ws, line);) {
    if (std::ranges::count(lines, line) == 0) lines.push_back(line);
  }
}

/// Reads every run's configuration, and reports all mistakes, each once.
std::vector<Run> prepare(const SweepPlan& plan, const LaunchRequest& request) {
  std::vector<Run> runs;
  std::vector<std::string> mistakes;
  std::map<std::string, std::string> labels;  // by configuration
  for (const SweepPlan::Run& planned : plan.runs) {
    std::vector<std::string> words = plan.arguments;
    words.insert(words.end(), planned.settings.begin(), planned.settings.end());
    try {
      config::Faults faults;
      const auto line = parse_arguments("sweep", words, faults);
      const ResolvedConfig resolved = resolve_config(line, faults);
      const Config& config = resolved.config;
      if (!resolved.can_be_reread) {
        throw base::UserError(
            "sweep: --config: each run reads the configuration, and a pipe can be read only once; "
            "name a file");
      }
      const std::string label = plan.label(planned);
      if (const auto [other, is_new] = labels.emplace(resolved.text, label); !is_new) {
        throw base::UserError(fmt::format("sweep: {} and {} are the same run; give each value once",
                                          other->second, label));
      }
      if (!config.resume.empty() && config.resume != "auto") {
        throw base::UserError("sweep: resume: each run of a sweep resumes its own checkpoint");
      }
      const fs::path all =
          config.run_dir.empty() ? "runs/" + resolved.name + "-sweep" : config.run_dir;
      Run run{.result = {.run = &planned, .folder = all / planned.folder, .state = "not run"}};
      run.overwrites = config.overwrite;
      run.is_finished = !config.overwrite && is_finished(run.result.folder, resolved);
      run.command = request.launcher;
      run.command.insert(run.command.end(), words.begin(), words.end());
      run.command.push_back("--run_dir=" + run.result.folder.string());
      run.command.emplace_back(config.overwrite ? "--resume=" : "--resume=auto");
      runs.push_back(std::move(run));
    } catch (const base::UserError& error) {
      add_lines(error.what(), mistakes);
    }
  }
  constexpr size_t kShown = 10;
  if (!mistakes.empty()) throw base::UserError(base::join_some(mistakes, "\n  ", kShown));
  return runs;
}

// ---- the runs -----------------------------------------------------------------------------------

/// While one lives, signals that ask to stop, and the end of a child, wait for next(). Signals that
/// were ignored before, as by nohup, stay ignored.
class Signals {
 public:
  Signals() {
    ::signal(SIGPIPE, SIG_IGN);  // a closed log does not end the sweep
    ::signal(SIGCHLD, SIG_DFL);
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGCHLD);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) {
      struct sigaction former {};
      ::sigaction(signal, nullptr, &former);
      if (former.sa_handler != SIG_IGN) ::sigaddset(&set_, signal);
    }
    ::sigprocmask(SIG_BLOCK, &set_, &former_);
  }
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  void restore() const {
    ::signal(SIGPIPE, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &former_, nullptr);
  }

  /// Waits for a signal.
  siginfo_t next() const {
    siginfo_t info{};
    while (::sigwaitinfo(&set_, &info) < 0) {
    }
    return info;
  }

  /// A signal that has arrived already, if any.
  std::optional<siginfo_t> pending() const {
    siginfo_t info{};
    const timespec now{};
    return ::sigtimedwait(&set_, &info, &now) < 0 ? std::nullopt : std::optional(info);
  }

 private:
  sigset_t set_{};
  sigset_t former_{};
};

/// Passes a signal on to a run.
///
/// The sender (a terminal, `timeout`, a batch system) may have sent it to the run as well, and a
/// launcher kills its workers at the second such signal, before they have saved. So the first one
/// is passed on as SIGUSR1 or SIGUSR2, which also ask a run to stop, and copies within a second are
/// dropped.
class Forwarding {
 public:
  void forward(pid_t child, const siginfo_t& info) {
    const auto now = Clock::now();
    const bool is_copy = now - last_ < std::chrono::seconds(1);
    const bool is_of_terminal = info.si_code == SI_KERNEL;
    const bool is_first = std::exchange(last_, now) == Clock::time_point();
    if (is_copy || is_of_terminal) return;
    const int alike = info.si_signo == SIGUSR1 ? SIGUSR2 : SIGUSR1;
    ::kill(child, is_first ? alike : info.si_signo);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
};

[[noreturn]] void become(const fs::path& program, const std::vector<std::string>& args,
                         pid_t parent) {
  // If the sweep is killed, the run saves and ends.
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(base::kExitPreempted);
  std::vector<std::string> words = {program.string()};
  words.insert(words.end(), args.begin(), args.end());
  ::execv(program.c_str(), base::argv_of(words).data());
  ::_exit(base::kExitCannotExecute);
}

/// Runs `train` with these arguments to its end.
/// @param stop_signal the first signal that asked the sweep to stop, or 0
int run_child(const Signals& signals, const std::vector<std::string>& args, int& stop_signal) {
  const fs::path program = base::program_file();
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) {
    throw base::UnavailableError(
        fmt::format("sweep: cannot start a process: {}", std::strerror(errno)));
  }
  if (child == 0) {
    signals.restore();
    become(program, args, parent);
  }
  Forwarding forwarding;
  for (;;) {
    const siginfo_t info = signals.next();
    int status = 0;
    if (info.si_signo == SIGCHLD) {
      if (::waitpid(child, &status, WNOHANG) != child) continue;
      return WIFSIGNALED(status) ? base::kExitSignalBase + WTERMSIG(status) : WEXITSTATUS(status);
    }
    if (stop_signal == 0) stop_signal = info.si_signo;
    forwarding.forward(child, info);
  }
}

/// The state of a run that has ended with this code.
std::string state_after(int code) {
  if (code == base::kExitOk) return kFinished;
  return code == base::kExitPreempted ? "stopped" : fmt::format("failed ({})", code);
}

/// Trains the runs that have not finished. Returns the sweep's exit code.
int make(const SweepPlan& plan, std::vector<Run>& runs) {
  const Signals signals;
  int first_failure = base::kExitOk;
  int stop_signal = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    Run& run = runs[i];
    const std::string label = plan.label(*run.result.run);
    if (run.is_finished) {
      spdlog::info("sweep: run {} of {}: {}: finished before", i + 1, runs.size(), label);
      run.result.state = kFinished;
      continue;
    }
    spdlog::info("sweep: run {} of {}: {}", i + 1, runs.size(), label);
    const int code = run_child(signals, run.command, stop_signal);
    run.result.state = state_after(code);
    if (first_failure == base::kExitOk) first_failure = code;
    while (const auto pending = signals.pending()) {
      if (pending->si_signo != SIGCHLD) stop_signal = pending->si_signo;
    }
    if (stop_signal != 0) {
      if (code != base::kExitOk) run.result.state = "stopped";
      if (code == base::kExitOk && i + 1 == runs.size()) break;
      spdlog::warn("sweep: stopped; the same command goes on{}",
                   run.overwrites ? ", without --overwrite" : "");
      return stop_signal == SIGINT ? base::kExitSignalBase + SIGINT : base::kExitPreempted;
    }
    if (code != base::kExitOk) {
      spdlog::warn("sweep: {} {} with {}; the sweep goes on", label,
                   code == base::kExitPreempted ? "stopped" : "failed", code);
    }
  }
  return first_failure;
}

}  // namespace

int sweep(const std::vector<std::string>& args) {
  const LaunchRequest request = split_launch_options(args);
  refuse_what_cannot_be(request);
  const SweepPlan plan = plan_sweep(request.program);
  std::vector<Run> runs = prepare(plan, request);
  const fs::path folder = runs.front().result.folder.parent_path();
  const base::UniqueFd lock =
      lock_folder(folder, "wait for the end of that sweep, or choose another run_dir");
  const int code = make(plan, runs);
  std::vector<SweepResult> results;
  for (const Run& run : runs) results.push_back(run.result);
  base::write_file_atomically(folder / kTable, sweep_csv(plan, results));
  base::write_stdout(sweep_table(plan, results));
  return code;
}

}  // namespace syncbn::train
