#pragma once

#include <string>
#include <vector>

namespace syncbn::test {

/// Two network namespaces connected by a virtual cable, which stand for two machines. Needs root
/// and `ip`.
///
/// Both know the names "node0" and "node1". As on Debian, a host's own name resolves to 127.0.1.1,
/// and the other's name to its address on the cable. The other's second name, "both0" or "both1",
/// also resolves to an address that no host has.
class TwoHosts {
 public:
  TwoHosts();
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  /// Whether this machine can create them. Tests are skipped otherwise.
  bool available() const { return available_; }

  /// The address on the cable of host 0 or 1.
  static std::string address(int host);
  static std::string address6(int host);

  /// argv that runs `command` on host 0 or 1.
  std::vector<std::string> on(int host, const std::vector<std::string>& command) const;

  /// argv that runs `command` with the content of `file` as the machine's boot_id, by which ranks
  /// know whether they are on the same machine.
  static std::vector<std::string> with_boot_id(const std::string& file,
                                               const std::vector<std::string>& command);

 private:
  std::string namespace_of(int host) const;
  std::string folder_of(int host) const;

  bool available_ = false;
};

}  // namespace syncbn::test
