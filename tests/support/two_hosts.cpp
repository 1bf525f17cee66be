#include "support/two_hosts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "support/program.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;

bool ip(const std::string& words) {
  return run_program({"sh", "-c", "ip " + words}).exit_code == 0;
}

}  // namespace

TwoHosts::TwoHosts() {
  available_ = ip("netns add " + namespace_of(0)) && ip("netns add " + namespace_of(1)) &&
               ip(fmt::format("-n {} link add cable type veth peer name cable netns {}",
                              namespace_of(0), namespace_of(1)));
  for (int host = 0; host < 2 && available_; ++host) {
    const std::string name = namespace_of(host);
    available_ = ip(fmt::format("-n {} addr add {}/24 dev cable", name, address(host))) &&
                 ip(fmt::format("-n {} addr add {}/64 dev cable nodad", name, address6(host))) &&
                 ip(fmt::format("-n {} link set cable up", name)) &&
                 ip(fmt::format("-n {} link set lo up", name));
    // `ip netns exec` mounts this file over /etc/hosts.
    std::error_code ignored;
    fs::create_directories(folder_of(host), ignored);
    std::ofstream(folder_of(host) + "/hosts") << fmt::format(
        "127.0.0.1 localhost\n127.0.1.1 node{0}\n{1} node{2}\n10.77.0.99 both{2}\n{1} both{2}\n",
        host, address(1 - host), 1 - host);
  }
}

TwoHosts::~TwoHosts() {
  for (int host = 0; host < 2; ++host) {
    ip("netns delete " + namespace_of(host));
    std::error_code ignored;
    fs::remove_all(folder_of(host), ignored);
  }
}

std::string TwoHosts::address(int host) {
  return fmt::format("10.77.0.{}", host + 1);
}

std::string TwoHosts::address6(int host) {
  return fmt::format("fd77::{}", host + 1);
}

std::vector<std::string> TwoHosts::on(int host, const std::vector<std::string>& command) const {
  std::vector<std::string> argv{"ip", "netns", "exec", namespace_of(host)};
  argv.insert(argv.end(), command.begin(), command.end());
  return argv;
}

std::vector<std::string> TwoHosts::with_boot_id(const std::string& file,
                                                const std::vector<std::string>& command) {
  std::vector<std::string> argv{
      "unshare", "--mount", "sh", "-c",
      "mount --bind " + file + " /proc/sys/kernel/random/boot_id && exec \"$0\" \"$@\""};
  argv.insert(argv.end(), command.begin(), command.end());
  return argv;
}

std::string TwoHosts::namespace_of(int host) const {
  return fmt::format("syncbn-{}-{}", ::getpid(), host);
}

std::string TwoHosts::folder_of(int host) const {
  return "/etc/netns/" + namespace_of(host);
}

}  // namespace syncbn::test
