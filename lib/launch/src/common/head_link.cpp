#include "common/head_link.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"

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
  watched_.add(input_.fd());
  watched_.add(timer_.get());
  await_next(true);
}

std::optional<int> HeadLink::next_signal() {
  read();
  while (const auto message = next_message(input_)) {
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
    while (auto message = next_message(input_)) {
      if (message->at("type") == type) return *message;
    }
    throw_if_gone();
    pollfd ready{watched_.fd(), POLLIN, 0};
    ::poll(&ready, 1, -1);
  }
}

void HeadLink::read() {
  const size_t before = input_.input().size();
  input_.receive();
  if (input_.input().size() > before) await_next(true);
}

void HeadLink::throw_if_gone() const {
  uint64_t expirations = 0;
  const bool silent = ::read(timer_.get(), &expirations, sizeof(expirations)) > 0;
  if (input_.error() == EBADMSG) throw_broken_protocol();
  if (!input_.has_ended() && !silent) return;
  throw base::UnavailableError(
      fmt::format("the launcher that started this one {}",
                  input_.has_ended() ? "is gone" : "has been silent for too long"));
}

void HeadLink::await_next(bool limited) {
  set_timer(timer_, limited ? silence_ : std::chrono::milliseconds(0));
}

}  // namespace syncbn::launch
