#include "job/worker_state.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>

#include "common/descriptors.h"
#include "common/json_messages.h"
#include "common/processes.h"
#include "common/text_table.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

// Upper bound on what is shown of a hanging process.
constexpr size_t kMaxStackBytes = size_t{32} << 10;

// Runs a program and returns its stdout, or "" if it fails. If the output is too long or the
// deadline passes, returns what has arrived by then.
std::string output_of(const std::vector<std::string>& words, Clock::time_point deadline) {
  Pipe pipe = Pipe::make();
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, pipe.writer.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const std::vector<char*> argv = base::argv_of(words);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) return "";
  pipe.writer.reset();
  set_nonblocking(pipe.reader);
  std::string text;
  ReadBuffer buffer;
  while (pipe.reader && text.size() < kMaxStackBytes &&
         base::poll_until(pipe.reader.get(), POLLIN, deadline)) {
    text += read_some(pipe.reader, buffer);
  }
  const bool is_cut = static_cast<bool>(pipe.reader);
  int status = -1;
  const pid_t ended = is_cut ? 0 : wait_for_child(pid, deadline, &status);
  if (ended == 0) {
    constexpr std::chrono::seconds kEnd{1};  // it may hang in the kernel as the worker does
    ::kill(pid, SIGKILL);
    wait_for_child(pid, Clock::now() + kEnd);
  }
  return is_cut || status == 0 ? text : "";
}

std::string kernel_view(pid_t pid) {
  std::string text;
  for (const fs::path& folder : entries_of(fmt::format("/proc/{}/task", pid))) {
    const std::string call = first_line(folder / "syscall");
    const std::string channel = first_line(folder / "wchan");
    text += fmt::format("thread {} ({}): {}{}{}\n", folder.filename().string(),
                        first_line(folder / "comm"), state_name(std::string(1, state_in(folder))),
                        channel.empty() || channel == "0" ? "" : ", waits in " + channel,
                        call.empty() ? "" : ", system call " + call.substr(0, call.find(' ')));
  }
  return text;
}

}  // namespace

std::string state_name(const std::string& state) {
  constexpr std::array kLetters{"R", "S", "D", "T", "t"};
  constexpr std::array kNames{"running", "sleeping", "in the kernel", "stopped", "traced", "ended"};
  return kNames.at(static_cast<size_t>(std::ranges::find(kLetters, state) - kLetters.begin()));
}

std::string WorkerState::name() const {
  return fmt::format("rank {} ({}{}, pid {})", rank, host, gpu.empty() ? "" : ", GPU " + gpu, pid);
}

std::vector<WorkerState> shortened(std::vector<WorkerState> workers, size_t max_bytes) {
  const auto fits = [&] { return json_line(nlohmann::json(workers)).size() <= max_bytes; };
  if (fits()) return workers;
  for (WorkerState& worker : workers) {
    worker.waits.clear();
    worker.called.clear();
  }
  while (!workers.empty() && !fits()) workers.resize(workers.size() * 31 / 32);
  return workers;
}

void describe_calls(const RankRecord& record, WorkerState& worker) {
  // The threshold of lib/dist's peer monitor: a shorter call is not held up.
  constexpr double kWaits = 1;  // s
  constexpr size_t kMaxWaits = 4;
  const auto now = static_cast<double>(base::monotonic_ns());
  for (const RankRecord::Group& group : record.groups) worker.called[group.name] = group.last;
  for (const RankRecord::Call& call : record.calls) {
    if (call.group >= record.groups.size()) continue;
    const RankRecord::Group& group = record.groups[call.group];
    // A send or recv waits for its peer only once a thread waits for it.
    const uint64_t since = call.is_collective() ? call.begin : call.awaited;
    if (since == 0) continue;
    const double seconds = (now - static_cast<double>(since)) / 1e9;
    if (call.end != 0 || seconds < kWaits || worker.waits.size() == kMaxWaits) continue;
    worker.waits.push_back({.group = group.name,
                            .sequence = call.sequence,
                            .peer = call.peer,
                            .call = record.name_of(call),
                            .seconds = seconds,
                            .ranks = group.ranks});
  }
}

char state_of_process(pid_t pid) {
  return pid > 0 ? state_in(fmt::format("/proc/{}", pid)) : '?';
}

void look_at_process(WorkerState& worker) {
  worker.process = std::string(1, state_of_process(worker.pid));
  const std::string call = first_line(fmt::format("/proc/{}/syscall", worker.pid));
  worker.place = call.substr(0, call.find(' '));
  worker.tracer =
      std::atoi(value_in(fmt::format("/proc/{}/status", worker.pid), "TracerPid:").c_str());
}

std::string table_of(const std::vector<WorkerState>& workers) {
  constexpr int kDoingWidth = 60;
  std::vector<std::vector<std::string>> rows{
      {"rank", "host", "pid", "process", "step", "last record", "doing"}};
  for (const WorkerState& one : workers) {
    const std::string process = one.pid == 0      ? "starts"
                                : one.tracer != 0 ? "debugged"
                                                  : state_name(one.process);
    std::string wait =
        one.collective > 0 ? fmt::format("waits in collective {}: ", one.collective) : "";
    if (!one.waits.empty()) {
      wait = fmt::format("waits in {} for {}{}", one.waits[0].call,
                         base::format_seconds(one.waits[0].seconds), one.doing.empty() ? "" : "; ");
    }
    rows.push_back({std::to_string(one.rank), one.host, std::to_string(one.pid), process,
                    one.reports ? std::to_string(one.steps) : "-",
                    one.reports ? base::format_seconds(one.idle_seconds) : "-",
                    wait + base::shortened(one.doing, kDoingWidth)});
  }
  return text_table(">5 <4 >8 <13 >9 >11 <0", rows);
}

std::string describe_threads(pid_t pid, Clock::time_point deadline) {
  const std::string number = std::to_string(pid);
  const std::string program = first_line(fmt::format("/proc/{}/comm", pid));
  std::string text;
  std::string hint;
  if (program.starts_with("python")) {
    text = output_of({"py-spy", "dump", "--nonblocking", "--pid", number}, deadline);
    if (text.empty()) {
      hint =
          "(py-spy or PYTHONFAULTHANDLER=1 shows the lines of Python; py-spy is not in PATH or may "
          "not attach)\n";
    }
  }
  if (text.empty()) text = output_of({"eu-stack", "-p", number}, deadline);
  if (text.empty()) {
    // With auto-loading, gdb would print at length which files it has refused.
    text = output_of({"gdb", "-iex", "set auto-load off", "-p", number, "-batch", "-nx", "-ex",
                      "set debuginfod enabled off", "-ex", "thread apply all backtrace 30"},
                     deadline);
  }
  if (text.empty()) text = kernel_view(pid);
  text.resize(std::min(text.size(), kMaxStackBytes));
  return hint + base::printable(text, "\n\t");
}

void abort_if_caught(pid_t pid, Clock::time_point deadline) {
  constexpr uint64_t kAbort = uint64_t{1} << (SIGABRT - 1);
  const uint64_t caught =
      std::strtoull(value_in(fmt::format("/proc/{}/status", pid), "SigCgt:").c_str(), nullptr, 16);
  if ((caught & kAbort) == 0 || ::kill(pid, SIGABRT) != 0) return;
  wait_until(deadline,
             [pid] { return std::string("Z?X").find(state_of_process(pid)) != std::string::npos; });
}

}  // namespace syncbn::launch
