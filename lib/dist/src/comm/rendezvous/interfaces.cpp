#include "rendezvous/interfaces.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>

#include <sys/socket.h>
#include <algorithm>
#include <cstdlib>
#include <memory>

namespace syncbn::dist::detail {
namespace {

struct InterfaceAddress {
  std::string interface;
  std::string address;
  bool ipv6 = false;
  bool link_local = false;
  bool loopback = false;

  /// Addresses of a smaller order are preferred: IPv4 first, as in PyTorch.
  int order() const { return (ipv6 ? 1 : 0) + (link_local ? 1 : 0); }
};

/// The addresses of the interfaces that are up, in order().
std::vector<InterfaceAddress> interface_addresses() {
  std::vector<InterfaceAddress> result;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return result;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, ::freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress found;
    found.interface = one->ifa_name;
    found.ipv6 = family == AF_INET6;
    found.loopback = (one->ifa_flags & IFF_LOOPBACK) != 0;
    if (found.ipv6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr);
      found.link_local = IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr);
    }
    found.address = base::numeric_address(one->ifa_addr,
                                          found.ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    result.push_back(std::move(found));
  }
  std::ranges::stable_sort(result, {}, &InterfaceAddress::order);
  return result;
}

/// Only asks the routing table: connecting a datagram socket sends nothing.
std::string default_route_address() {
  sockaddr_in anywhere{};
  anywhere.sin_family = AF_INET;
  anywhere.sin_port = htons(9);
  ::inet_pton(AF_INET, "203.0.113.1", &anywhere.sin_addr);  // reserved for documentation
  const base::UniqueFd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  auto* generic = reinterpret_cast<sockaddr*>(&anywhere);
  socklen_t size = sizeof(anywhere);
  if (!fd || ::connect(fd.get(), generic, size) != 0) return "";
  return ::getsockname(fd.get(), generic, &size) == 0 ? base::numeric_address(generic, size) : "";
}

/// @param source where the user gave the name, for the message.
std::string interface_address(const std::string& name, const std::string& source) {
  std::vector<std::string> names;
  for (const InterfaceAddress& one : interface_addresses()) {
    if (one.interface == name) return one.address;
    if (std::ranges::count(names, one.interface) == 0) names.push_back(one.interface);
  }
  throw base::UserError(fmt::format(
      "{} names the network interface '{}', which {} does not have, or which is down; it has {}",
      source, name, base::hostname(), base::join(names, ", ")));
}

}  // namespace

std::vector<std::string> chosen_addresses(const std::string& option) {
  if (!option.empty()) return {interface_address(option, "InitOptions::interface")};
  const std::string list = base::env("GLOO_SOCKET_IFNAME").value_or("");
  std::vector<std::string> addresses;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    addresses.push_back(interface_address(list.substr(begin, end - begin), "GLOO_SOCKET_IFNAME"));
    begin = end + 1;
  }
  return addresses;
}

void set_nccl_environment(const std::string& interface) {
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), /*overwrite=*/0);
  };
  // Without the "=", NCCL would take the name as a prefix.
  if (!interface.empty()) set("NCCL_SOCKET_IFNAME", "=" + interface);
  // While the process exits, calls of CUDA fail, which libtorch's watchdog would turn into SIGABRT.
  set("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0");
  // libtorch's default names in this folder are the same for all jobs.
  const auto job = base::env("SYNCBN_JOB_ID");
  const auto home = base::env("HOME");
  const auto cache = base::env("XDG_CACHE_HOME");
  if (job && (cache || home)) {
    set("TORCH_FR_DUMP_TEMP_FILE",
        fmt::format("{}/torch/comm_lib_trace_{}_rank_", cache ? *cache : *home + "/.cache", *job));
  }
}

std::string outside_address() {
  if (std::string address = default_route_address(); !address.empty()) return address;
  for (const InterfaceAddress& one : interface_addresses()) {
    if (!one.loopback && !one.link_local) return one.address;
  }
  return "";
}

}  // namespace syncbn::dist::detail
