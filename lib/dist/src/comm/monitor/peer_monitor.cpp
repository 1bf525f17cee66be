#include "monitor/peer_monitor.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

namespace syncbn::dist::detail {
namespace {

using std::chrono::milliseconds;

// Grace period for messages that a rank sent before it died.
constexpr milliseconds kDeliveryTime{400};
// Time for a running rank to answer how far it is.
constexpr milliseconds kAnswerTime{1000};
// The failure arrives over Gloo, its cause over this channel: give the cause time to catch up.
constexpr milliseconds kNewsTime{2000};
// Connections of a dead process close before its parent is notified. Ranks that notice this wait,
// so that a launcher sees the first failure first.
constexpr milliseconds kParentNoticesTime{200};
// Upper bound on sending the leave notice: rank 0 may be stopped and not read it.
constexpr milliseconds kLeaveTime{5000};
// After this time in a call, a rank reports the call. Not an error: other ranks may be slow.
constexpr milliseconds kStuckTime{1000};

// Upper bound on asking the GPU which calls have ended; a query normally takes a microsecond.
constexpr milliseconds kQueryTime{100};

// The answer of a rank that has made the same call.
constexpr char kSameCall[] = "in";

// Types of messages about a failure.
constexpr char kDiffer[] = "differ";
constexpr char kGaveUp[] = "gave-up";

constexpr char kLeft[] = "has left the group (destroy_process_group)";
constexpr char kEndedProgram[] = "has ended its program";

// Upper bound on the stuck collectives that are kept per group.
constexpr size_t kMaxStuck = 16;

std::atomic<bool> skips_destructors{false};
std::atomic<bool> skips_destructors_after_failure{false};

/// The key in PeerMonitor::Completed of a rank's sends to a peer, or its recvs from it.
std::string name_of_transfers(const std::string& group, bool are_sends, int rank, int peer) {
  return fmt::format("{} {}{}{}", group, rank, are_sends ? '>' : '<', peer);
}

std::weak_ptr<PeerMonitor>& living() {
  static auto* const instance = new std::weak_ptr<PeerMonitor>;
  return *instance;
}

}  // namespace

std::shared_ptr<PeerMonitor> PeerMonitor::join(c10d::Store& store, int rank, int world_size,
                                               const std::string& address, milliseconds limit) {
  std::shared_ptr<PeerMonitor> monitor;
  try {
    monitor.reset(new PeerMonitor(store, rank, world_size, address, limit));
  } catch (const c10::Error& error) {
    throw base::UnavailableError(fmt::format("rank {} of {}: the store failed: {}", rank,
                                             world_size, error.what_without_backtrace()));
  }
  living() = monitor;
  handle_exit();
  return monitor;
}

PeerMonitor::PeerMonitor(c10d::Store& store, int rank, int world_size, const std::string& address,
                         milliseconds limit)
    : process_(::getpid()), channel_(store, rank, world_size, address, limit) {
  channel_.start({.message = [this](const Message& message) { on_message(message); },
                  .end = [this](int ended, const std::string& where) { on_end(ended, where); },
                  .tick = [this] { supervise(); }});
}

PeerMonitor::~PeerMonitor() {
  leave(kLeft);
  std::map<std::string, std::thread> asking;
  {
    const Lock lock(mutex_);  // supervise() starts none after leave()
    asking.swap(overdue_);
  }
  for (auto& [group, thread] : asking) thread.join();
}

void PeerMonitor::handle_exit() {
  static const bool once = [] {
    ::on_exit(
        [](int status, void* /*unused*/) {
          leave_with(status);
          if (!skips_destructors && (status == 0 || !skips_destructors_after_failure)) return;
          std::fflush(nullptr);
          ::_exit(status);
        },
        nullptr);
    std::at_quick_exit([] { leave_with(0); });
    return true;
  }();
  (void)once;
}

void PeerMonitor::skip_destructors() {
  handle_exit();
  skips_destructors = true;
}

void PeerMonitor::skip_destructors_after_failure() {
  handle_exit();
  skips_destructors_after_failure = true;
}

void PeerMonitor::leave_with(int exit_code) {
  const auto monitor = living().lock();
  if (!monitor) return;
  monitor->leave(exit_code == 0 ? kEndedProgram
                                : fmt::format("ended with exit code {}", exit_code));
}

void PeerMonitor::leave(const std::string& manner) {
  // A forked child is not a rank, and a thread of its parent may have held the mutex.
  if (::getpid() != process_) return;
  queries_.update(logs_now(), kQueryTime);
  std::vector<std::string> fields{manner};
  {
    const Held held = hold();
    if (std::exchange(has_left_, true)) return;
    add_completed(held.logs, /*with_running=*/false, fields);
  }
  channel_.post(Message::kAll, "leave", std::move(fields));
  channel_.flush(kLeaveTime);
}

void PeerMonitor::announce_leave() {
  queries_.update(logs_now(), kQueryTime);
  std::vector<std::string> fields{fmt::format("{} {}", self(), kLeft)};
  const Held held = hold();
  add_completed(held.logs, /*with_running=*/true, fields);
  channel_.post(Message::kAll, "left", std::move(fields));
}

/// Adds pairs of a group's name and the number of its collectives in which this rank has done its
/// part. With `with_running`, also pairs for sends and recvs: the rank ends only after those that
/// run.
void PeerMonitor::add_completed(const Logs& logs, bool with_running,
                                std::vector<std::string>& fields) {
  const auto add = [&fields](std::string name, uint64_t number) {
    fields.push_back(std::move(name));
    fields.push_back(std::to_string(number));
  };
  for (const auto& log : logs) {
    add(log->group(), log->completed(with_running));
    if (!with_running) continue;
    for (const auto& [with, transfers] : log->transfers()) {
      const auto& [peer, type] = with;
      add(name_of_transfers(log->group(), type == c10d::OpType::SEND, rank(), peer),
          transfers.done);
    }
  }
}

std::string PeerMonitor::self() const {
  return fmt::format("rank {} ({})", rank(), channel_.where());
}

void PeerMonitor::add(const std::shared_ptr<FlightRecorder>& log) {
  const Lock lock(mutex_);
  logs_.push_back(log);
}

PeerMonitor::Logs PeerMonitor::logs_now() {
  Logs logs;
  const Lock lock(mutex_);
  std::erase_if(logs_, [&logs](const std::weak_ptr<FlightRecorder>& weak) {
    if (auto log = weak.lock()) logs.push_back(std::move(log));
    return weak.expired();
  });
  return logs;
}

PeerMonitor::Held PeerMonitor::hold() {
  return {logs_now(), Lock(mutex_)};
}

void PeerMonitor::on_message(const Message& message) {
  const Held held = hold();
  const std::string group = message.field(0);
  if (message.type == "leave") {
    leave_notices_[message.from] = {group, completed_of(message)};
  } else if (message.type == "left") {
    ends_.try_emplace(message.from, End{group, Clock::now(), completed_of(message), ++events_});
    news_.notify_all();
  } else if (message.type == "stuck") {
    receive_stuck(message);
  } else if (message.type == "stuck-transfer") {
    stuck_transfers_[group] = {message.from,      message.field(1),  message.field(2),
                               message.number(3), message.number(4), message.number(5),
                               message.field(6),  message.number(7)};
  } else if (message.type == kDiffer || message.type == kGaveUp) {
    receive_failure(message.type, group, message.field(1), held.logs);
  } else if (message.type == "where") {
    answer(message, held.logs);
  } else if (message.type == "here") {
    const auto question = answers_.find(message.number(0));
    if (question == answers_.end()) return;  // too late
    question->second[message.from] = message.field(1);
    news_.notify_all();
  }
}

// All ranks of a group may find the same failure at once. They send it only to rank 0, which
// forwards the first one: otherwise n ranks would send n² messages.

void PeerMonitor::receive_stuck(const Message& report) {
  std::map<uint64_t, Stuck>& known = stuck_[report.field(0)];
  const bool is_news =
      known.try_emplace(report.number(1), Stuck{report.field(3), report.number(2), report.field(4)})
          .second;
  if (known.size() > kMaxStuck) known.erase(known.begin());
  if (is_news && rank() == 0) channel_.post(Message::kAll, report.type, report.fields);
}

void PeerMonitor::receive_failure(const std::string& type, const std::string& group,
                                  const std::string& what, const Logs& logs) {
  if (failures_.count(group) != 0) return;
  failures_[group] = {.what = what, .ranks_disagree = type == kDiffer, .order = ++events_};
  for (const auto& log : logs) {
    if (log->group() == group) log->set_failed();
  }
  news_.notify_all();
  if (rank() == 0) channel_.post(Message::kAll, type, {group, what});
}

void PeerMonitor::report_failure(const std::string& type, const std::string& group,
                                 const std::string& what, const Logs& logs) {
  if (failures_.count(group) != 0) return;
  receive_failure(type, group, what, logs);
  if (rank() != 0) channel_.post(0, type, {group, what});
}

/// Records a rank's end when its connection ends, not when its leave notice arrives: by then the
/// launcher has seen this failure, before those of other ranks.
void PeerMonitor::on_end(int rank, const std::string& where) {
  const Lock lock(mutex_);
  const auto found = leave_notices_.find(rank);
  const auto notice = found == leave_notices_.end() ? LeaveNotice{"died", {}} : found->second;
  disconnected_.try_emplace(rank, Clock::now());
  ends_.try_emplace(rank, End{fmt::format("rank {} ({}) {}", rank, where, notice.manner),
                              Clock::now(), notice.completed, ++events_});
  news_.notify_all();
}

PeerMonitor::Completed PeerMonitor::completed_of(const Message& message) {
  Completed completed;
  for (size_t i = 1; i + 1 < message.fields.size(); i += 2) {
    completed[message.field(i)] = message.number(i + 1);
  }
  return completed;
}

bool PeerMonitor::has_lost(const std::vector<int>& ranks, milliseconds grace) {
  const Lock lock(mutex_);
  return std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto found = disconnected_.find(rank);
    return found != disconnected_.end() && Clock::now() - found->second >= grace;
  });
}

std::string PeerMonitor::end_among(const std::vector<int>& ranks, milliseconds patience) {
  Lock lock(mutex_);
  const End* first = nullptr;
  const bool found = news_.wait_for(lock, patience, [&] {
    for (const int rank : ranks) {
      const auto end = ends_.find(rank);
      if (end == ends_.end()) continue;
      if (first == nullptr || end->second.order < first->order) first = &end->second;
    }
    return first != nullptr;
  });
  if (!found) return "";
  const auto [what, report_at] = std::pair(first->what, first->when + kParentNoticesTime);
  lock.unlock();
  std::this_thread::sleep_until(report_at);
  return what;
}

/// Answers a rank whose call timed out: how far this rank is.
void PeerMonitor::answer(const Message& question, const Logs& logs) {
  const std::string group = question.field(1);
  const uint64_t sequence = question.number(2);
  std::string text = fmt::format("{} has not called it", self());
  for (const auto& log : logs) {
    if (log->group() != group) continue;
    const auto same = log->find(sequence);
    const auto last = log->last_collective();
    if (same && same->fingerprint() == question.number(3)) {
      text = kSameCall;
    } else if (same) {
      text = fmt::format("{} has called {} in its place", self(), same->describe());
    } else if (last && last->sequence < sequence) {
      text += fmt::format(": its last call is {} #{}", last->describe(), last->sequence);
    } else if (last) {
      text = kSameCall;  // it was in the call, and has made later ones
    }
  }
  channel_.post(question.from, "here", {question.field(0), text});
}

/// Asks the running ranks of the group how far they are. Returns what is wrong with those that are
/// not in the call. Stops waiting when the cause becomes known.
std::string PeerMonitor::ask_ranks(Lock& lock, const FlightRecorder& log, const Call& call) {
  const uint64_t id =
      ++questions_ * static_cast<uint64_t>(world_size()) + static_cast<uint64_t>(rank());
  std::map<int, std::string>& answers = answers_[id];
  std::vector<int> asked;
  std::vector<std::string> texts;
  for (const int member : log.ranks()) {
    const bool concerned = call.is_collective() ? member != rank() : member == call.peer;
    if (!concerned) continue;
    if (ends_.count(member) != 0) continue;
    asked.push_back(member);
    channel_.post(member, "where",
                  {std::to_string(id), log.group(), std::to_string(call.sequence),
                   std::to_string(call.fingerprint())});
  }
  const bool known = news_.wait_for(lock, kAnswerTime, [&] {
    return answers.size() == asked.size() || known_failure(log, call);
  });
  for (const int member : asked) {
    const auto answer = answers.find(member);
    if (answer == answers.end()) {
      if (known) continue;
      texts.push_back(
          fmt::format("rank {} does not answer: it is stopped, or cannot be reached", member));
    } else if (call.is_collective() && answer->second != kSameCall) {
      texts.push_back(answer->second);
    }
  }
  answers_.erase(id);
  return base::join(texts, "; ");
}

/// Whether the call needs `rank`, which has ended.
bool PeerMonitor::concerns(int rank, const End& end, const FlightRecorder& log,
                           const Call& call) const {
  if (!call.is_collective()) {
    if (call.peer != rank) return false;
    // Messages that a rank sent before it left still arrive, however late.
    const bool are_sends = call.type == c10d::OpType::RECV;
    const auto transfers =
        end.completed.find(name_of_transfers(log.group(), are_sends, rank, this->rank()));
    return transfers == end.completed.end() || transfers->second < call.with_peer;
  }
  const auto done = end.completed.find(log.group());
  return log.has_member(rank) && (done == end.completed.end() || done->second < call.sequence);
}

/// The earliest event that keeps the call from succeeding; later ones may be its consequences.
std::optional<PeerMonitor::Failure> PeerMonitor::known_failure(const FlightRecorder& log,
                                                               const Call& call) const {
  std::optional<Failure> first;
  const auto failure = failures_.find(log.group());
  if (failure != failures_.end()) first = failure->second;
  for (const auto& [rank, end] : ends_) {
    if (!concerns(rank, end, log, call) || (first && first->order < end.order)) continue;
    first =
        Failure{.what = end.what, .report_at = end.when + kParentNoticesTime, .order = end.order};
  }
  return first;
}

PeerMonitor::Cause PeerMonitor::cause_of(const FlightRecorder& log, const Call& call,
                                         const std::string& reason, bool timed_out) {
  auto [logs, lock] = hold();
  std::string text = reason;
  if (timed_out && !known_failure(log, call)) {
    const std::string where = ask_ranks(lock, log, call);
    if (!where.empty()) text += "; " + where;
  } else {
    news_.wait_for(lock, kNewsTime, [&] { return known_failure(log, call).has_value(); });
  }
  if (const auto failure = known_failure(log, call)) {
    lock.unlock();
    std::this_thread::sleep_until(failure->report_at);
    return {failure->what, failure->ranks_disagree};
  }
  report_failure(kGaveUp, log.group(),
                 fmt::format("{} gave up {}: {}", self(), call.numbered(), text), logs);
  return timed_out ? Cause{text} : Cause{};
}

/// Whether the call waits for a rank that has ended and whose messages have had time to arrive.
bool PeerMonitor::is_lost(const FlightRecorder& log, const FlightRecorder::Pending& pending) const {
  const Clock::time_point now = Clock::now();
  return std::any_of(ends_.begin(), ends_.end(), [&](const auto& entry) {
    const auto& [rank, end] = entry;
    return concerns(rank, end, log, pending.call) &&
           now - std::max(end.when, pending.since) >= kDeliveryTime;
  });
}

void PeerMonitor::supervise() {
  queries_.update(logs_now(), kQueryTime);
  std::vector<std::pair<std::shared_ptr<FlightRecorder>, Call>> to_abort;
  {
    const Held held = hold();
    if (has_left_) return;
    for (const auto& log : held.logs) {
      const std::vector<FlightRecorder::Pending> pending = log->pending();
      compare_with_stuck(*log, pending, held.logs);
      report_stuck(*log, pending);
      give_up_overdue(log, pending);
      report_transport_error(*log, held.logs);
      const bool failed = failures_.count(log->group()) != 0;
      const auto first = std::find_if(pending.begin(), pending.end(), [&](const auto& one) {
        return failed || is_lost(*log, one);
      });
      if (first != pending.end()) to_abort.emplace_back(log, first->call);
    }
  }
  for (const auto& [log, call] : to_abort) log->abort(call);
}

/// Reports errors of calls on GPUs, for which no thread waits. If a rank has ended, that is the
/// cause instead.
void PeerMonitor::report_transport_error(const FlightRecorder& log, const Logs& logs) {
  const auto error = log.transport_error();
  if (!error || Clock::now() - error->when < kNewsTime || known_failure(log, error->call)) return;
  report_failure(kGaveUp, log.group(),
                 fmt::format("{} gave up {}: {}", self(), error->call.numbered(), error->what),
                 logs);
}

/// Ends calls on GPUs, for which no thread waits, as a waiting thread would after the timeout.
void PeerMonitor::give_up_overdue(const std::shared_ptr<FlightRecorder>& log,
                                  const std::vector<FlightRecorder::Pending>& pending) {
  const auto found = std::find_if(pending.begin(), pending.end(), [](const auto& one) {
    return one.timeout && Clock::now() - one.since > *one.timeout;
  });
  if (found == pending.end() || overdue_.count(log->group()) != 0) return;
  const std::string reason = fmt::format("timed out after {} ms", found->timeout->count());
  // Not on this thread, which receives the answers.
  overdue_[log->group()] = std::thread([this, log, call = found->call, reason] {
    static_cast<void>(cause_of(*log, call, reason, true));
  });
}

/// Lets ranks that made different calls find that out: they wait for each other, see tag_of().
void PeerMonitor::report_stuck(const FlightRecorder& log,
                               const std::vector<FlightRecorder::Pending>& pending) {
  const std::string& group = log.group();
  for (const auto& [call, since, timeout] : pending) {
    if (Clock::now() - since < kStuckTime) continue;
    const bool is_collective = call.is_collective();
    uint64_t& reported = (is_collective ? reported_ : reported_transfers_)[group];
    if (reported >= call.sequence) continue;
    reported = call.sequence;
    if (is_collective) {
      const Message report{rank(),
                           0,
                           "stuck",
                           {group, std::to_string(call.sequence),
                            std::to_string(call.fingerprint()), self(), call.describe()}};
      if (rank() == 0) {
        receive_stuck(report);
      } else {
        channel_.post(0, report.type, report.fields);
      }
    } else {
      channel_.post(call.peer, "stuck-transfer",
                    {group, self(), call.name, std::to_string(static_cast<uint64_t>(call.tag)),
                     std::to_string(static_cast<int>(call.dtype)), std::to_string(call.elements()),
                     call.describe(), std::to_string(call.with_peer)});
    }
  }
}

void PeerMonitor::compare_with_stuck(const FlightRecorder& log,
                                     const std::vector<FlightRecorder::Pending>& pending,
                                     const Logs& logs) {
  for (const auto& [sequence, theirs] : stuck_[log.group()]) {
    const auto own = log.find(sequence);
    if (own && own->fingerprint() != theirs.fingerprint) {
      report_failure(kDiffer, log.group(),
                     fmt::format("#{} is {} on {}, and {} on {}", sequence, theirs.call, theirs.who,
                                 own->describe(), self()),
                     logs);
    }
  }
  if (const auto found = stuck_transfers_.find(log.group()); found != stuck_transfers_.end()) {
    const StuckTransfer& theirs = found->second;
    for (const auto& [own, since, timeout] : pending) {
      // Each may still meet its match.
      if (Clock::now() - since < kStuckTime) continue;
      // With another number, theirs may have met its match since it was reported.
      const bool is_other_end = own.peer == theirs.peer && own.name != theirs.name &&
                                own.with_peer == theirs.with_peer &&
                                static_cast<uint64_t>(own.tag) == theirs.tag;
      const bool fits = static_cast<uint64_t>(own.dtype) == theirs.dtype &&
                        static_cast<uint64_t>(own.elements()) == theirs.elements;
      if (!is_other_end || fits) continue;
      report_failure(
          kDiffer, log.group(),
          fmt::format("{} on {} meets {} on {}", theirs.call, theirs.who, own.describe(), self()),
          logs);
    }
  }
}

}  // namespace syncbn::dist::detail
