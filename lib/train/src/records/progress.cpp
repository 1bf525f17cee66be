#include "records/progress.h"

#include <fcntl.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/env.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <utility>

namespace syncbn::train {
namespace {

constexpr auto kHeartbeatInterval = std::chrono::seconds(1);

base::UniqueFd adopt() {
  const auto number = base::env_int("SYNCBN_AGENT_FD", 0, std::numeric_limits<int>::max());
  if (!number) return {};
  ::unsetenv("SYNCBN_AGENT_FD");
  const int fd = static_cast<int>(*number);
  // The variable may be stale: the descriptor is then closed, or is another file's.
  const int flags = ::fcntl(fd, F_GETFL);
  struct stat what {};
  if (::fstat(fd, &what) != 0 || !S_ISFIFO(what.st_mode) || (flags & O_ACCMODE) == O_RDONLY) {
    return {};
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  return base::UniqueFd(fd);
}

}  // namespace

AgentChannel::AgentChannel(int rank) : rank_(rank), fd_(adopt()) {
  send(SYNCBN_AGENT_HELLO);
}

AgentChannel::~AgentChannel() {
  if (!has_reported_) send(SYNCBN_AGENT_HEARTBEAT, steps_);
}

std::chrono::milliseconds AgentChannel::hang_timeout(
    std::chrono::steady_clock::duration longest_step) {
  constexpr std::chrono::minutes kShortest(10);
  constexpr int kSteps = 20;
  return std::max<std::chrono::milliseconds>(
      kShortest, std::chrono::duration_cast<std::chrono::milliseconds>(kSteps * longest_step));
}

void AgentChannel::heartbeat(uint64_t steps) {
  if (!fd_) return;
  const auto now = std::chrono::steady_clock::now();
  const auto begin = std::exchange(step_begin_, now);
  if (begin.time_since_epoch().count() > 0) longest_step_ = std::max(longest_step_, now - begin);
  if (const auto timeout = hang_timeout(longest_step_); timeout > asked_timeout_) {
    asked_timeout_ = timeout;
    send(SYNCBN_AGENT_TIMEOUT, static_cast<uint64_t>(timeout.count()));
  }
  steps_ = steps;
  has_reported_ = is_due();
  if (has_reported_) send(SYNCBN_AGENT_HEARTBEAT, steps);
}

void AgentChannel::phase(const std::string& text, std::chrono::minutes allowance) {
  if (!fd_) return;
  const std::chrono::milliseconds time = allowance;
  step_begin_ = {};
  // The next heartbeat, which ends the allowance, must not wait until a second is over.
  if (time.count() > 0) last_heartbeat_ = {};
  send(SYNCBN_AGENT_PHASE, static_cast<uint64_t>(time.count()), /*total=*/0, text);
}

void AgentChannel::phase_goes_on(const std::string& text) {
  if (is_due()) phase(text, std::chrono::minutes(0));
}

bool AgentChannel::is_due() {
  const auto now = std::chrono::steady_clock::now();
  if (!fd_ || now - last_heartbeat_ < kHeartbeatInterval) return false;
  last_heartbeat_ = now;
  return true;
}

void AgentChannel::tell(syncbn_agent_kind kind, const std::string& text) {
  if (text.size() < sizeof(syncbn_agent_record::text)) send(kind, 0, 0, text);
}

syncbn_agent_record AgentChannel::send(syncbn_agent_kind kind, uint64_t done, uint64_t total,
                                       const std::string& text) {
  syncbn_agent_record record{};
  record.magic = SYNCBN_AGENT_MAGIC;
  record.version = SYNCBN_AGENT_VERSION;
  record.kind = static_cast<uint16_t>(kind);
  record.rank = rank_;
  record.time_ns = base::monotonic_ns();
  record.done = done;
  record.total = total;
  base::utf8_prefix(text, sizeof(record.text) - 1).copy(record.text, sizeof(record.text));
  if (fd_ && ::write(fd_.get(), &record, sizeof(record)) < 0) {
    // A full pipe may have room later. Any other error means that the launcher has gone.
    if (errno != EAGAIN && errno != EINTR) fd_.reset();
  }
  return record;
}

// With LOCAL_RANK set, another launcher started this worker: other ranks may write to the terminal.
Progress::Progress(AgentChannel& channel, std::chrono::milliseconds line_interval)
    : channel_(channel),
      draws_(!channel && !base::env("LOCAL_RANK") && ::isatty(STDERR_FILENO) == 1),
      line_interval_(line_interval) {
  if (draws_ || (channel && base::env("SYNCBN_AGENT_BAR"))) line_interval_.reset();
}

void Progress::show(int64_t done, int64_t total, const std::function<std::string()>& text,
                    bool as_line) {
  const auto now = Clock::now();
  if (now - last_ < base::ProgressBar::kPeriod) return;
  last_ = now;
  const std::string shown = text();
  update(channel_.send(SYNCBN_AGENT_PROGRESS, static_cast<uint64_t>(done),
                       static_cast<uint64_t>(total), shown),
         now);
  if (!as_line) {
    last_line_ = now;
  } else if (line_interval_ && now - last_line_ >= *line_interval_) {
    log(done, total, shown);
  }
}

void Progress::log(int64_t done, int64_t total, const std::string& text) {
  const auto now = Clock::now();
  last_line_ = now;
  base::ProgressState state = bar_.state(now);
  state.done = static_cast<uint64_t>(done);
  state.total = static_cast<uint64_t>(total);
  state.text = text;
  // The prefix is that of init_logging().
  lines_ += (lines_.empty() ? "" : "\nI ") + base::progress_line(state);
  if (now - written_ >= base::ProgressBar::kPeriod) clear();
}

void Progress::clear() {
  const auto now = Clock::now();
  update(channel_.send(SYNCBN_AGENT_CLEAR), now);
  if (lines_.empty()) return;
  written_ = now;
  spdlog::info("{}", std::exchange(lines_, {}));
}

void Progress::update(const syncbn_agent_record& record, Clock::time_point now) {
  bar_.update(record, now);
  if (draws_ && bar_.due())
    base::write_stderr("\r\x1b[K" + bar_.draw(base::terminal_columns(), now));
}

}  // namespace syncbn::train
