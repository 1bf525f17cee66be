#include "rendezvous/place.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/store_greeting.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace syncbn::dist::detail {
namespace {

using base::UserError;

int required(const std::optional<int>& given, const char* name, int64_t min, int64_t max,
             const std::string& source) {
  if (given) {
    if (*given < min || *given > max) {
      throw UserError(fmt::format("{} must be from {} to {}, got {}", name, min, max, *given));
    }
    return *given;
  }
  if (const auto value = base::env_int(name, min, max)) return static_cast<int>(*value);
  throw UserError(
      fmt::format("{} needs {}, which is not set; start the program with syncbn-launch, which sets "
                  "it, or give it in InitOptions",
                  source, name));
}

bool answers_as_store(int fd, base::Deadline deadline) {
  constexpr uint32_t kNonce = 0x6e636273;
  const std::string greeting = base::store_greeting(kNonce);
  const ssize_t sent = ::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(greeting.size())) return false;
  std::array<char, sizeof(kNonce)> answer;
  for (size_t got = 0; got < answer.size();) {
    if (!base::poll_until(fd, POLLIN, deadline)) return false;
    const ssize_t more = ::recv(fd, &answer[got], answer.size() - got, 0);
    if (more <= 0) return false;
    got += static_cast<size_t>(more);
  }
  return std::memcmp(answer.data(), &kNonce, sizeof(kNonce)) == 0;
}

/// Listens at the first of the addresses that this host has.
StoreEndpoint::Listener listen_at_first(const addrinfo* addresses) {
  StoreEndpoint::Listener result;
  result.error = EADDRNOTAVAIL;
  for (const addrinfo* one = addresses; one != nullptr && result.error == EADDRNOTAVAIL;
       one = one->ai_next) {
    result.fd = base::listen_at(*one);
    result.error = result.fd ? 0 : errno;
    if (result.error == EAFNOSUPPORT) result.error = EADDRNOTAVAIL;  // a host without IPv6
    if (result.fd) result.address = base::numeric_address(one->ai_addr, one->ai_addrlen);
  }
  return result;
}

}  // namespace

StoreEndpoint StoreEndpoint::parse(const std::string& url) {
  constexpr std::string_view kScheme = "tcp://";
  const auto place = base::parse_host_port(std::string_view(url).substr(kScheme.size()));
  if (!place || place->port.value_or(0) == 0) {
    throw UserError(
        fmt::format("init_method '{}' is not tcp://host:port with a port from 1 to 65535", url));
  }
  return {place->host, static_cast<uint16_t>(*place->port)};
}

std::string StoreEndpoint::str() const {
  return fmt::format("{}:{}", host, port);
}

StoreEndpoint::Listener StoreEndpoint::listen(bool several_hosts, const std::string& other) const {
  std::string reason;
  const base::AddressList list = base::resolve(host, port, reason);
  if (!list) {
    throw UserError(fmt::format("MASTER_ADDR={} cannot be resolved: {}", host, reason));
  }
  const bool other_only = several_hosts && !other.empty() && is_own_name();
  Listener result = listen_at_first(other_only ? nullptr : list.get());
  if (result.error == EADDRNOTAVAIL && !other.empty()) {
    result = listen_at_first(base::resolve(other, port, reason).get());
    result.at_host = other_only;
  }
  if (result.error == 0 || result.error == EADDRINUSE) return result;
  throw base::UnavailableError(fmt::format(
      "rank 0 cannot listen on {}: {}; MASTER_ADDR must be an address of the host of rank 0", str(),
      std::strerror(result.error)));
}

std::optional<StoreEndpoint::Route> StoreEndpoint::probe(base::Deadline deadline,
                                                         const std::string& other,
                                                         std::string& reason) const {
  const auto look = [&](const base::AddressList& list) {
    return base::connect_to_any(
        list.get(), deadline, reason, [&](int connection, base::Deadline patience) {
          if (answers_as_store(connection, patience)) return true;
          reason = "what listens there does not answer as a store of torch does";
          return false;
        });
  };
  base::UniqueFd fd = look(base::resolve(host, port, reason));
  if (!fd && !other.empty() && is_own_name()) {
    std::string ignored;
    fd = look(base::resolve(other, port, ignored));
  }
  if (!fd) return std::nullopt;
  return Route{base::peer_address(fd.get(), /*own=*/true), base::peer_address(fd.get())};
}

bool StoreEndpoint::is_own_name() const {
  std::string reason;
  const base::AddressList list = base::resolve(host, port, reason);
  return list && !base::is_loopback(host) &&
         base::is_loopback(base::numeric_address(list->ai_addr, list->ai_addrlen));
}

bool has_agent_store() {
  return base::env("TORCHELASTIC_USE_AGENT_STORE") == "True";
}

Place Place::find(const InitOptions& options) {
  constexpr int64_t kMaxRanks = 1 << 20;
  Place place;
  const std::string source = fmt::format("init_method '{}'", options.init_method);
  if (options.init_method.starts_with("tcp://")) {
    place.master = StoreEndpoint::parse(options.init_method);
  } else if (options.init_method.starts_with("file://")) {
    place.file = options.init_method.substr(std::string_view("file://").size());
    if (!place.file.starts_with('/') || place.file.ends_with('/')) {
      throw UserError(fmt::format("{} is not file:///path", source));
    }
    place.is_elastic = has_agent_store();
  } else if (options.init_method != "env://") {
    throw UserError(
        fmt::format("{} is not known; it is env://, tcp://host:port or file:///path", source));
  } else if (!options.rank && !options.world_size && !base::env("RANK") &&
             !base::env("WORLD_SIZE")) {
    return place;  // no launcher: a world of one rank
  }
  place.world_size = required(options.world_size, "WORLD_SIZE", 1, kMaxRanks, source);
  place.rank = required(options.rank, "RANK", 0, kMaxRanks, source);
  if (place.rank >= place.world_size) {
    throw UserError(
        fmt::format("RANK={} is not below WORLD_SIZE={}", place.rank, place.world_size));
  }
  if (place.world_size > 1 && place.master.port == 0 && place.file.empty()) {
    const auto host = base::env("MASTER_ADDR");
    const auto port = base::env_int("MASTER_PORT", 1, 65535);
    if (!host || !port) {
      throw UserError(fmt::format(
          "WORLD_SIZE={} needs MASTER_ADDR and MASTER_PORT, and {} is not set; start the program "
          "with syncbn-launch, which sets them",
          place.world_size, host ? "MASTER_PORT" : "MASTER_ADDR"));
    }
    place.master = {*host, static_cast<uint16_t>(*port)};
    place.agent_holds_store = place.is_elastic = has_agent_store();
  }
  return place;
}

std::string Place::how_to_separate_jobs() const {
  if (file.empty()) return "give each job a MASTER_PORT of its own";
  return fmt::format("give each job a file of its own, and delete '{}' if an earlier job left it",
                     file);
}

bool Place::on_several_hosts() const {
  const auto local = base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20);
  return local && *local < world_size;
}

}  // namespace syncbn::dist::detail
