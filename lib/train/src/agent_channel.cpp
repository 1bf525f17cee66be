#include "agent_channel.h"

#include <fcntl.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace syncbn::train {
namespace {

constexpr auto kHeartbeatInterval = std::chrono::seconds(1);

uint64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

base::UniqueFd adopt() {
  const auto number = base::env_int("SYNCBN_AGENT_FD", 0, std::numeric_limits<int>::max());
  if (!number) return {};
  ::unsetenv("SYNCBN_AGENT_FD");
  const int fd = static_cast<int>(*number);
  // A descriptor that is not there, or not for writing, is somebody else's leftover.
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) return {};
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  return base::UniqueFd(fd);
}

}  // namespace

AgentChannel::AgentChannel(int rank) : rank_(rank), fd_(adopt()) {
  if (fd_) send(SYNCBN_AGENT_HELLO, 0, 0, "");
}

void AgentChannel::heartbeat(uint64_t steps) {
  const auto now = std::chrono::steady_clock::now();
  if (!fd_ || now - last_heartbeat_ < kHeartbeatInterval) return;
  last_heartbeat_ = now;
  send(SYNCBN_AGENT_HEARTBEAT, steps, 0, "");
}

void AgentChannel::progress(uint64_t done, uint64_t total, const std::string& text) {
  if (fd_) send(SYNCBN_AGENT_PROGRESS, done, total, text);
}

void AgentChannel::clear() {
  if (fd_) send(SYNCBN_AGENT_CLEAR, 0, 0, "");
}

void AgentChannel::send(syncbn_agent_kind kind, uint64_t done, uint64_t total,
                        const std::string& text) {
  syncbn_agent_record record{};
  record.magic = SYNCBN_AGENT_MAGIC;
  record.version = SYNCBN_AGENT_VERSION;
  record.kind = static_cast<uint16_t>(kind);
  record.rank = rank_;
  record.time_ns = monotonic_ns();
  record.done = done;
  record.total = total;
  base::utf8_prefix(text, sizeof(record.text) - 1).copy(record.text, sizeof(record.text));
  const ssize_t written = ::write(fd_.get(), &record, sizeof(record));
  // A launcher that is gone takes no more records; a full pipe may later.
  if (written < 0 && errno != EAGAIN && errno != EINTR) fd_.reset();
}

}  // namespace syncbn::train
