#include "preflight/link_check.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <syncbn/base/channel.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/error.h>
#include <syncbn/base/held_port.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "common/clock.h"

namespace syncbn::launch {
namespace {

// One-byte commands. The other end answers kAsk with its clock. After kTake, kBlock bytes follow;
// the other end answers them with one byte.
constexpr char kAsk = 'a';
constexpr char kTake = 't';
constexpr size_t kBlock = size_t{4} << 20;
// Upper bound on the connections that have not sent the id.
constexpr size_t kMaxNewcomers = 64;

[[noreturn]] void fail(const char* what, int error) {
  throw base::UnavailableError(fmt::format("{}: {}", what, std::strerror(error)));
}

// Not through a base::Channel: its copies would slow what is measured.

void send_all(int fd, std::string_view bytes, base::Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) fail("cannot send", errno);
    if (sent < 0 && !base::poll_until(fd, POLLOUT, deadline)) fail("cannot send", ETIMEDOUT);
  }
}

// Returns how many bytes have arrived, from 1 to `size`.
size_t receive_some(int fd, char* buffer, size_t size, base::Deadline deadline) {
  for (;;) {
    const ssize_t got = ::recv(fd, buffer, size, MSG_DONTWAIT);
    if (got > 0) return static_cast<size_t>(got);
    if (got == 0) fail("cannot receive", ECONNRESET);
    if (errno != EAGAIN && errno != EINTR) fail("cannot receive", errno);
    if (!base::poll_until(fd, POLLIN, deadline)) fail("cannot receive", ETIMEDOUT);
  }
}

std::string receive(int fd, size_t size, base::Deadline deadline) {
  std::string text(size, '\0');
  for (size_t got = 0; got < size;) {
    got += receive_some(fd, text.data() + got, size - got, deadline);
  }
  return text;
}

void discard(int fd, size_t size, base::Deadline deadline) {
  ReadBuffer buffer;
  while (size > 0) {
    size -= receive_some(fd, buffer.data(), std::min(size, buffer.size()), deadline);
  }
}

}  // namespace

void answer_probe(int fd, base::Deadline deadline) {
  try {
    for (;;) {
      const char command = receive(fd, 1, deadline)[0];
      if (command == kAsk) {
        const int64_t time = base::unix_ns();
        send_all(fd, {reinterpret_cast<const char*>(&time), sizeof(time)}, deadline);
      } else {
        discard(fd, kBlock, deadline);
        send_all(fd, {&kTake, 1}, deadline);
      }
    }
  } catch (const base::UnavailableError&) {
    // The other end has finished, or reports the error itself.
  }
}

LinkServer::LinkServer(std::string id, base::Deadline deadline)
    : id_(std::move(id)), deadline_(deadline), listener_(base::bind_all_addresses(0)) {
  if (!listener_ || ::listen(listener_.get(), 16) != 0) {
    base::throw_errno("no free TCP port to measure the network");
  }
  port_ = base::bound_port(listener_.get());
  thread_ = std::thread([this] { serve(); });
}

LinkServer::~LinkServer() {
  stop_.writer.reset();
  thread_.join();
}

void LinkServer::serve() {
  // Waits for all connections at once: a stranger must not use up the time of the expected node,
  // which may take long to send the id.
  std::vector<base::Channel> newcomers;
  while (Clock::now() < deadline_) {
    std::vector<pollfd> polls{{listener_.get(), POLLIN, 0}, {stop_.reader.get(), POLLIN, 0}};
    for (const base::Channel& one : newcomers) polls.push_back({one.fd(), POLLIN, 0});
    if (::poll(polls.data(), polls.size(), base::milliseconds_until(deadline_)) <= 0) continue;
    if (polls[1].revents != 0) return;
    for (base::Channel& one : newcomers) {
      one.receive(id_.size() - one.input().size());
      if (one.input() == id_) answer_probe(one.fd(), deadline_);
    }
    std::erase_if(newcomers, [this](const base::Channel& one) {
      return one.has_ended() || one.input().size() == id_.size();
    });
    if (polls[0].revents == 0) continue;
    base::UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) continue;
    if (newcomers.size() == kMaxNewcomers) newcomers.erase(newcomers.begin());
    newcomers.emplace_back(std::move(fd));
  }
}

LinkProbe::LinkProbe(const std::string& host, int port, const std::string& id,
                     base::Deadline deadline)
    : deadline_(deadline) {
  std::string reason;
  const base::AddressList addresses = base::resolve(host, port, reason);
  if (addresses) fd_ = base::connect_to_any(addresses.get(), deadline, reason);
  if (!fd_)
    throw base::UnavailableError(fmt::format("no connection to {}:{}: {}", host, port, reason));
  const int on = 1;
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  send_all(fd_.get(), id, deadline_);
}

LinkProbe::Trip LinkProbe::measure_trip() {
  constexpr int kTrips = 50;
  Trip best{.seconds = 1e9};
  for (int i = 0; i < kTrips; ++i) {
    const int64_t begin = base::unix_ns();
    const auto steady = Clock::now();
    send_all(fd_.get(), {&kAsk, 1}, deadline_);
    int64_t there = 0;
    receive(fd_.get(), sizeof(there), deadline_)
        .copy(reinterpret_cast<char*>(&there), sizeof(there));
    const double seconds = base::seconds_since(steady);
    if (seconds >= best.seconds) continue;
    int64_t ahead = 0;  // the other end may send any number, and the difference may overflow
    if (__builtin_sub_overflow(there, begin, &ahead)) ahead = there;
    best = {seconds, 1e-9 * static_cast<double>(ahead) - seconds / 2};
  }
  return best;
}

double LinkProbe::measure_rate(base::Deadline deadline) {
  constexpr double kTime = 0.3;
  const std::string block(kBlock, 'x');
  const auto begin = Clock::now();
  double sent = 0;
  double seconds = 0;
  while (seconds < kTime) {
    send_all(fd_.get(), {&kTake, 1}, deadline);
    send_all(fd_.get(), block, deadline);
    receive(fd_.get(), 1, deadline);
    sent += static_cast<double>(kBlock);
    seconds = base::seconds_since(begin);
  }
  return sent / seconds;
}

}  // namespace syncbn::launch
