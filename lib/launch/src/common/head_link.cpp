#include "common/head_link.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::launch {

void throw_broken_protocol() {
  throw base::UnavailableError("the launcher that started this one does not keep to the protocol");
}

int number_in(const nlohmann::json& message, const char* key) {
  const auto found = message.find(key);
  if (found == message.end() || !found->is_number_integer()) throw_broken_protocol();
  return *found;
}

HeadLink::HeadLink(base::UniqueFd input, std::chrono::milliseconds silence)
    : silence_(silence),
      input_(std::move(input)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!timer_) base::throw_errno("cannot watch the connection to the head");
  watched_.add(input_.get());
  watched_.add(timer_.get());
  await_next(true);
}

std::optional<int> HeadLink::next_signal() {
  read();
  while (const auto message = next()) {
    if (message->at("type") != "signal") continue;
    const int signal = number_in(*message, "signal");
    await_next(signal != SIGSTOP);
    return signal;
  }
  throw_if_gone();
  return std::nullopt;
}

nlohmann::json HeadLink::wait_for(const std::string& type) {
  for (;;) {
    read();
    while (auto message = next()) {
      if (message->at("type") == type) return *message;
    }
    throw_if_gone();
    pollfd ready{watched_.fd(), POLLIN, 0};
    ::poll(&ready, 1, -1);
  }
}

void HeadLink::read() {
  std::array<char, 65536> buffer;
  pollfd readable{input_.get(), POLLIN, 0};
  while (!closed_ && ::poll(&readable, 1, 0) > 0) {
    const ssize_t got = ::read(input_.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    closed_ = got <= 0;
    if (closed_) return;
    incoming_.append(buffer.data(), static_cast<size_t>(got));
    await_next(true);
  }
}

std::optional<nlohmann::json> HeadLink::next() {
  const size_t end = incoming_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  auto message =
      nlohmann::json::parse(incoming_.substr(0, end), nullptr, /*allow_exceptions=*/false);
  incoming_.erase(0, end + 1);
  if (message.is_object() && message.contains("type")) return message;
  throw_broken_protocol();
}

void HeadLink::throw_if_gone() const {
  uint64_t expirations = 0;
  const bool silent = ::read(timer_.get(), &expirations, sizeof(expirations)) > 0;
  if (!closed_ && !silent) return;
  throw base::UnavailableError(fmt::format("the launcher that started this one {}",
                                           closed_ ? "is gone" : "has been silent for too long"));
}

void HeadLink::await_next(bool limited) {
  itimerspec time{};
  if (limited) {
    time.it_value = {.tv_sec = silence_.count() / 1000,
                     .tv_nsec = silence_.count() % 1000 * 1'000'000};
  }
  ::timerfd_settime(timer_.get(), 0, &time, nullptr);
}

}  // namespace syncbn::launch
