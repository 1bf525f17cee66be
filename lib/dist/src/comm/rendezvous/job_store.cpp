#include "rendezvous/job_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "rendezvous/arrival.h"

namespace syncbn::dist::detail {
namespace {

using base::UnavailableError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstRetryDelay{10};
constexpr milliseconds kLongestRetryDelay{500};
// For a store that is there already to answer.
constexpr milliseconds kFirstAnswerTime{1000};
// Upper bound on one answer: a store that serves a thousand ranks may be slow, or be stopped.
constexpr timeval kMaxAnswerTime{.tv_sec = 60, .tv_usec = 0};

/// Waits until the store answers, and says on which way.
/// c10d's own client does this too, with a screenful of warnings, and for ever where the port is
/// that of a program which keeps silent.
StoreEndpoint::Route wait_for_store(const Place& place, const std::string& other,
                                    Clock::time_point deadline, milliseconds limit) {
  std::string reason;
  milliseconds delay = kFirstRetryDelay;
  for (;;) {
    if (const auto route = place.master.probe(deadline, other, reason)) return *route;
    if (Clock::now() + delay > deadline) break;
    std::this_thread::sleep_for(delay);
    delay = std::min(delay * 2, kLongestRetryDelay);
  }
  throw UnavailableError(
      fmt::format("rank {} of {} on {}: nobody answered at MASTER_ADDR:MASTER_PORT {} within {} "
                  "({}); is rank 0 running, and is the address right?",
                  place.rank, place.world_size, base::hostname(), place.master.str(),
                  base::format_seconds(std::chrono::duration<double>(limit).count()), reason));
}

c10d::TCPStoreOptions store_options(const Place& place, milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = place.master.port;
  options.numWorkers = static_cast<size_t>(place.world_size);
  // For its client, which tries again for as long when the store ends between probe and connection.
  options.timeout = limit;
  return options;
}

/// c10d waits for answers of the store without a timeout, on a socket that it keeps to itself.
void bound_answers(const Place& place) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::getpeername(fd, generic, &size) != 0 || base::port_of(address) != place.master.port)
      continue;
    base::detect_lost_host(fd);
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kMaxAnswerTime, sizeof(kMaxAnswerTime));
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kMaxAnswerTime, sizeof(kMaxAnswerTime));
  }
}

/// A client counts itself as one of the workers: where Python holds the store, its rank 0 waits
/// for all of them.
JoinedStore connect_to(const Place& place, const StoreEndpoint::Route& route, milliseconds limit) {
  // By the address: its client would spend all of its time on another that swallows packets.
  auto store = c10::make_intrusive<c10d::TCPStore>(route.store, store_options(place, limit));
  bound_answers(place);
  return {std::move(store), route.own};
}

JoinedStore connect_as_second(const Place& place, const StoreEndpoint::Route& route,
                              milliseconds limit) {
  JoinedStore result = connect_to(place, route, limit);
  result.held_by_other = true;
  return result;
}

std::string holder_key() {
  return "syncbn/holder/" + process_id();
}

JoinedStore hold_store(const Place& place, const std::string& other, Clock::time_point deadline,
                       milliseconds limit) {
  std::string reason;
  StoreEndpoint::Listener listener = place.master.listen(place.on_several_hosts(), other);
  if (!listener.fd || !listener.at_host) {
    const auto soon = std::min(deadline, Clock::now() + kFirstAnswerTime);
    if (const auto route = place.master.probe(soon, other, reason)) {
      return connect_as_second(place, *route, limit);
    }
  }
  if (!listener.fd) {
    throw UnavailableError(
        fmt::format("rank 0 cannot listen on {}: another program holds the port; choose another "
                    "MASTER_PORT",
                    place.master.str()));
  }
  c10d::TCPStoreOptions options = store_options(place, limit);
  options.isServer = true;
  options.waitWorkers = false;  // arrive() waits, and can name who is missing
  options.masterListenFd = listener.fd.release();
  JoinedStore result;
  result.store = c10::make_intrusive<c10d::TCPStore>(listener.address, options);
  result.held_here = true;
  result.store->set(holder_key(), "yes");
  const StoreEndpoint::Route route = wait_for_store(place, other, deadline, limit);
  result.address = route.own;
  if (listener.at_host) return result;
  // Who answers may be a service that leads to this store, or another rank 0.
  JoinedStore second = connect_as_second(place, route, limit);
  return second.store->check({holder_key()}) ? result : second;
}

JoinedStore open_file_store(const Place& place, milliseconds limit) {
  // FileStore would try again for as long as its timeout.
  const base::UniqueFd fd(::open(place.file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd) {
    throw base::UserError(fmt::format(
        "rank {} of {} on {}: init_method 'file://{}': {}; the file is made in a folder that is "
        "there, shared by all ranks, and may be written to",
        place.rank, place.world_size, base::hostname(), place.file, std::strerror(errno)));
  }
  JoinedStore result;
  result.store = c10::make_intrusive<c10d::FileStore>(place.file, place.world_size);
  result.store->setTimeout(limit);
  result.address = "127.0.0.1";  // nothing says on which way peers are
  return result;
}

}  // namespace

JoinedStore join_job_store(const Place& place, const std::string& other, Clock::time_point deadline,
                           milliseconds limit) {
  if (!place.file.empty()) return open_file_store(place, limit);
  if (place.should_hold_store()) return hold_store(place, other, deadline, limit);
  return connect_to(place, wait_for_store(place, other, deadline, limit), limit);
}

}  // namespace syncbn::dist::detail
