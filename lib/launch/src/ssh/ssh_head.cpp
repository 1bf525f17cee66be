#include "ssh/ssh_head.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/random.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/descriptors.h"
#include "common/head_link.h"
#include "common/json_messages.h"
#include "common/processes.h"
#include "options/hosts.h"
#include "output/failure_report.h"
#include "workers/program.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kAlivePeriod = HeadLink::kSilence / 4;
constexpr seconds kNoticePeriod{10};

// Grace period for nodes to end, beyond --shutdown_timeout for their workers.
constexpr seconds kNodePatience = seconds(5) + Output::kFilePatience;
constexpr seconds kSshKillPatience{3};

// Grace period for nodes to clean up after a head or launcher was killed. Less than the 2 s after
// which no process may be left.
constexpr milliseconds kOrphanGrace{1000};

// The exit code of ssh when ssh itself failed.
constexpr int kSshFailed = 255;

// Makes the node's pipes, and returns the process for the keeper to start.
// @param theirs receives the process's ends of the pipes.
WorkerSpec connect(HeadNode& node, std::vector<base::UniqueFd>& theirs) {
  Pipe in_pipe = Pipe::make();
  Pipe out_pipe = Pipe::make();
  Pipe err_pipe = Pipe::make();
  WorkerSpec spec{.file = find_program(node.plan.start[0]),
                  .argv = node.plan.start,
                  .env = base::environment_with({}),
                  .stdin_fd = in_pipe.reader.get(),
                  .stdout_fd = out_pipe.writer.get(),
                  .stderr_fd = err_pipe.writer.get()};
  for (base::UniqueFd* fd : {&in_pipe.reader, &out_pipe.writer, &err_pipe.writer}) {
    theirs.push_back(std::move(*fd));
  }
  node.in = base::Channel(std::move(in_pipe.writer));
  node.pipes = {std::move(out_pipe.reader), std::move(err_pipe.reader)};
  for (const base::UniqueFd* fd : {&node.pipes.out, &node.pipes.err}) set_nonblocking(*fd);
  return spec;
}

// True for exit codes of the launcher itself; any other code came from the program that ran in its
// place.
bool is_launcher_error(int exit_code) {
  constexpr std::array kCodes{base::kExitUsage, base::kExitInternal, base::kExitUnavailable,
                              base::kExitCannotExecute, base::kExitNotFound};
  return std::ranges::find(kCodes, exit_code) != kCodes.end();
}

// Why a node ended before it answered.
std::string problem_of(const HeadNode& node, int wait_status, const LaunchOptions& options) {
  const std::string last = node.last_words.empty() ? "" : fmt::format(": {}", node.last_words);
  const int code = exit_code_of(wait_status);
  if (node.start_error)
    return fmt::format("cannot be started: {}", base::describe_errno(*node.start_error));
  if (code == kSshFailed && !node.plan.is_here) {
    return node.last_words.empty() ? "ssh failed without a message" : node.last_words;
  }
  if (code == base::kExitNotFound || code == base::kExitCannotExecute) {
    return fmt::format("there is no {} to execute (--ssh_launcher){}", launcher_on_hosts(options),
                       last);
  }
  if (!node.plan.is_here && !is_launcher_error(code)) {
    return fmt::format("{} has not started the launcher there ({}){}", options.head.ssh[0],
                       ExitStatus{wait_status}.in_words(), last);
  }
  return fmt::format("its launcher ended with {}{}", ExitStatus{wait_status}.in_words(), last);
}

// The hosts that have not answered: "a, b".
std::string names_of_unanswered(const std::vector<HeadNode>& nodes) {
  std::vector<std::string> names;
  for (const HeadNode& node : nodes) {
    if (node.state == HeadNode::State::kAsked) names.push_back(node.plan.host.full_name());
  }
  return base::join(names, ", ");
}

}  // namespace

SshHead::SshHead(const LaunchOptions& options, std::vector<NodePlan> plan)
    : options_(options),
      mark_(fmt::format("syncbn-node-{}", base::random_id())),
      signals_(options.ending_signals),
      output_({.out = {.is_terminal = ::isatty(STDOUT_FILENO) == 1},
               .err = {.is_terminal = ::isatty(STDERR_FILENO) == 1}}),
      next_alive_(Clock::now() + kAlivePeriod) {
  for (NodePlan& node : plan) {
    nodes_.push_back({.plan = std::move(node), .lines = NodeLines(mark_)});
  }
}

int SshHead::run() {
  start();
  if (!wait_until_ready()) {
    report_problems();
  } else if (!ended_by_signal_) {
    begun_ = true;
    send_to_all({{"type", "go"}, {"master_port", master_port_}});
    wait_for_end();
  }
  keeper_->finish(kSshKillPatience);
  for (size_t i = 0; i < nodes_.size(); ++i) output_.finish(i, Stream::kOut);
  const int code = exit_code();
  write_report(output_, options_.report, report(code));
  const int final_code = wait_for_reader(output_, signals_, code, ended_by_signal_.has_value());
  if (final_code != code) write_report(output_, options_.report, report(final_code));
  return final_code;
}

void SshHead::start() {
  // If the keeper is killed, its orphans become our children.
  become_subreaper();
  NodeJob job{.version = SYNCBN_VERSION,
              .mark = mark_,
              .folder = std::filesystem::current_path(),
              .token = options_.token,
              .colours = terminal_colours()};
  const Variables exported = exported_variables(options_.head.exports);
  std::vector<WorkerSpec> specs;
  std::vector<base::UniqueFd> their_ends;
  for (HeadNode& node : nodes_) {
    specs.push_back(connect(node, their_ends));
    job.words = node.plan.words;
    job.environment = node.plan.environment(exported);
    job.speaks_for_all = &node == &nodes_[0];
    send_message(node.in, job.to_json());
  }
  output_.begin_attempt(
      std::vector<WorkerOutput>(nodes_.size(), {.whole_lines = nodes_.size() > 1}));
  keeper_ = std::make_unique<Keeper>(
      specs, [] {}, kOrphanGrace);
}

bool SshHead::wait_until_ready() {
  const auto deadline = Clock::now() + options_.head.ssh_timeout;
  auto next_notice = Clock::now() + kNoticePeriod;
  while (!names_of_unanswered(nodes_).empty() && !ended_by_signal_ && Clock::now() < deadline) {
    poll_once(std::min(deadline, next_notice));
    if (Clock::now() < next_notice) continue;
    next_notice = Clock::now() + kNoticePeriod;
    output_.announce("waiting for an answer of {}", names_of_unanswered(nodes_));
  }
  for (HeadNode& node : nodes_) {
    if (node.state != HeadNode::State::kAsked || ended_by_signal_) continue;
    node.problem = {base::kExitUnavailable,
                    fmt::format("no answer within {} (--ssh_timeout)",
                                base::format_seconds(options_.head.ssh_timeout))};
  }
  return std::ranges::none_of(nodes_,
                              [](const HeadNode& node) { return node.problem.has_value(); });
}

void SshHead::report_problems() {
  std::vector<std::pair<std::string, std::vector<std::string>>> problems;  // and their hosts
  for (const HeadNode& node : nodes_) {
    if (!node.problem) continue;
    if (first_failure_ == 0) first_failure_ = node.problem->exit_code;
    const std::string& what = node.problem->what;
    auto same = std::ranges::find(problems, what, &decltype(problems)::value_type::first);
    if (same == problems.end()) same = problems.insert(same, {what, {}});
    same->second.push_back(node.plan.host.full_name());
  }
  for (const auto& [what, hosts] : problems) {
    output_.announce("error: {}: {}", base::join(hosts, ", "), what);
  }
  output_.announce("nothing has been started");
}

void SshHead::wait_for_end() {
  const auto runs = [](const HeadNode& node) { return node.state != HeadNode::State::kEnded; };
  heard_ = Clock::now();
  while (std::ranges::any_of(nodes_, runs)) {
    const auto by_signal = give_up_at_.value_or(Clock::time_point::max());
    const auto due = patience_ ? std::min(by_signal, heard_ + *patience_) : by_signal;
    if (Clock::now() >= due) return give_up_silent();
    poll_once(due);
  }
}

void SshHead::limit_rest(milliseconds notice_time) {
  const auto patience = notice_time + options_.shutdown_timeout + kNodePatience;
  patience_ = std::min<milliseconds>(patience, patience_.value_or(patience));
}

void SshHead::give_up_silent() {
  std::vector<std::string> here;
  std::vector<std::string> elsewhere;
  for (HeadNode& node : nodes_) {
    if (node.state == HeadNode::State::kEnded) continue;
    (node.plan.is_here ? here : elsewhere).push_back(node.plan.host.full_name());
    node.problem = {base::kExitUnavailable, "does not answer"};
  }
  lost_any_ = true;
  const auto say = [this](const std::vector<std::string>& hosts, const char* what) {
    if (hosts.empty()) return;
    output_.announce("error: {} do{} not answer; {}", base::join(hosts, ", "),
                     hosts.size() == 1 ? "es" : "", what);
  };
  say(here, "what runs there is killed");
  say(elsewhere, "what runs there may still run");
  // The keepers of these launchers clean up.
  keeper_->signal_workers(SIGKILL);
  const auto cleaned_up = Clock::now() + kOrphanGrace;
  while (Clock::now() < cleaned_up) poll_once(cleaned_up);
}

void SshHead::poll_once(Clock::time_point until) {
  std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}, {keeper_->fd(), POLLIN, 0}};
  output_.add_to(polls);
  // A node whose output is not read does not count as silent.
  if (output_.reader_waits()) heard_ = Clock::now();
  for (const HeadNode& node : nodes_) {
    if (node.in.unsent() > 0) polls.push_back({node.in.fd(), POLLOUT, 0});
    node.pipes.add_to(polls, output_);
  }
  ::poll(polls.data(), polls.size(), base::milliseconds_until(std::min(until, next_alive_)));
  handle_signals();
  output_.flush();
  for (size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].in.flush();
    nodes_[i].pipes.read(output_, sink(i));
  }
  while (const auto event = keeper_->next_event()) handle_event(*event);
  if (keeper_->gone()) {
    keeper_->clean_up_after_loss(kSshKillPatience);
    throw base::UnavailableError(
        fmt::format("the keeper process (pid {}) was killed; the connections to all hosts have "
                    "been closed",
                    keeper_->pid()));
  }
  if (Clock::now() < next_alive_) return;
  next_alive_ = Clock::now() + kAlivePeriod;
  keeper_->reap_orphans();
  send_to_all({{"type", "alive"}});
}

void SshHead::handle_signals() {
  while (const auto signal = signals_.next()) {
    if (signals_.ends(*signal)) {
      end_by_signal(*signal);
    } else if (*signal == SIGTSTP) {
      // The terminal's SIGTSTP does not reach workers in other sessions or on other machines.
      pass_on(SIGSTOP);
      Signals::stop_self();
      heard_ = Clock::now();
      pass_on(SIGCONT);
    } else if (*signal != SIGWINCH) {
      pass_on(*signal);
    }
  }
}

void SshHead::end_by_signal(int signal) {
  const bool again = ended_by_signal_.has_value();
  if (!again) ended_by_signal_ = signal;
  // The second signal makes nodes kill their workers at once.
  pass_on(signal);
  // Node 0 waits for its workers, and until a silent node counts as lost.
  const auto patience =
      std::max<milliseconds>(options_.shutdown_timeout, options_.silence()) + kNodePatience;
  give_up_at_ = Clock::now() + (again ? kSshKillPatience : patience);
}

void SshHead::pass_on(int signal) {
  send_to_all({{"type", "signal"}, {"signal", signal}});
}

void SshHead::handle_event(const KeeperEvent& event) {
  using Kind = KeeperEvent::Kind;
  const auto index = static_cast<size_t>(event.worker);
  HeadNode& node = nodes_[index];
  const bool has_no_process = event.kind == Kind::kForkFailed || event.kind == Kind::kNotStarted;
  if (event.kind == Kind::kForkFailed || event.kind == Kind::kBindFailed ||
      event.kind == Kind::kExecFailed) {
    node.start_error = event.value;
  }
  if (event.kind != Kind::kExited && !has_no_process) return;
  // Print its last output before the message about its end.
  node.pipes.drain(sink(index));
  node.lines.finish(line_sinks(index));
  node_ended(node, has_no_process ? 0 : event.value);
}

void SshHead::node_ended(HeadNode& node, int status) {
  node.state = HeadNode::State::kEnded;
  if (node.exit_code || node.problem) return;  // the node has reported it
  const int code = exit_code_of(status);
  // Whether ssh failed or was killed, rather than the launcher behind it.
  const bool is_connection = !node.plan.is_here && (code == kSshFailed || WIFSIGNALED(status));
  const bool failed = is_launcher_error(code);
  if (!begun_) {
    node.problem = {failed ? code : base::kExitUnavailable, problem_of(node, status, options_)};
    return;
  }
  if (failed && first_failure_ == 0) first_failure_ = code;
  if (!failed) lost_any_ = true;
  limit_rest(options_.silence());
  output_.announce("error: the {} {} is gone ({}{}); so are its workers",
                   is_connection ? "connection to" : "launcher on", node.plan.host.full_name(),
                   is_connection ? "ssh: " : "", ExitStatus{status}.in_words());
}

OutputPipes::Sink SshHead::sink(size_t index) {
  return [this, index](Stream stream, std::string_view bytes) {
    heard_ = Clock::now();
    if (stream == Stream::kErr) {
      nodes_[index].lines.feed(bytes, line_sinks(index));
    } else if (begun_) {  // output before that comes from the user's .bashrc
      output_.write(index, stream, bytes);
    }
  };
}

NodeLines::Sinks SshHead::line_sinks(size_t index) {
  return {.line = [this, index](std::string_view line) { take_line(index, line); },
          .message =
              [this, index](std::string_view text) {
                if (nodes_[index].problem) return;
                const auto message = parse_node_message(text);
                if (!message || !handle_message(index, *message)) give_up(nodes_[index], text);
              }};
}

void SshHead::take_line(size_t index, std::string_view line) {
  if (begun_) {
    output_.write(index, Stream::kErr, fmt::format("{}\n", line));
  } else if (line.find_first_not_of(" \r") != std::string_view::npos) {
    nodes_[index].last_words = line.substr(0, line.find('\r'));
  }
}

bool SshHead::handle_message(size_t index, const NodeMessage& message) {
  HeadNode& node = nodes_[index];
  if (const NodeEnded* const ended = std::get_if<NodeEnded>(&message)) {
    if (!begun_) return false;
    // Only the node of the first failure reports it.
    if (ended->tells_failure || report_.empty()) report_ = ended->report;
    node.exit_code = ended->exit_code;
    limit_rest({});
    if (first_failure_ == 0) first_failure_ = ended->exit_code;
    return true;
  }
  if (node.state != HeadNode::State::kAsked) return false;
  node.state = HeadNode::State::kAnswered;
  if (const auto* const problem = std::get_if<NodeProblem>(&message)) node.problem = *problem;
  if (index == 0 && !node.problem) master_port_ = std::get<NodeReady>(message).master_port;
  return true;
}

// Another program, or a launcher of another version, writes to the node's stderr.
void SshHead::give_up(HeadNode& node, std::string_view message) {
  constexpr int kColumns = 81;
  const std::string what = fmt::format("does not keep to the protocol: it sent '{}'",
                                       base::shortened(base::printable(message), kColumns));
  node.problem = {base::kExitUnavailable, "its launcher " + what};
  // The node's launcher ends when its stdin closes.
  node.in.close();
  node.pipes.err.reset();
  node.state = HeadNode::State::kEnded;
  if (!begun_) return;
  lost_any_ = true;
  limit_rest(options_.silence());
  output_.announce("error: the launcher on {} {}; its workers are killed",
                   node.plan.host.full_name(), what);
}

void SshHead::send_to_all(const Json& message) {
  for (HeadNode& node : nodes_) {
    if (node.state != HeadNode::State::kEnded) send_message(node.in, message);
  }
}

int SshHead::exit_code() const {
  if (first_failure_ != 0) return first_failure_;
  if (ended_by_signal_) return base::kExitSignalBase + *ended_by_signal_;
  return lost_any_ ? base::kExitUnavailable : base::kExitOk;
}

std::string SshHead::report(int exit_code) const {
  auto report = nlohmann::ordered_json::parse(report_.empty() ? json_report(exit_code) : report_);
  report["exit_code"] = exit_code;
  return report.dump(2) + "\n";
}

}  // namespace syncbn::launch
