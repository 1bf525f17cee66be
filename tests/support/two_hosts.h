#pragma once

#include <string>
#include <vector>

namespace syncbn::test {

/// Two network namespaces joined by a cable, in place of two machines. Needs root and `ip`.
///
/// Both know "node0" and "node1". As on Debian, a host's own name leads to 127.0.1.1, and the
/// other's to its address on the cable. The other has a second name, "both0" or "both1", which
/// leads to an address of nobody's, too.
class TwoHosts {
 public:
  TwoHosts();
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  /// Whether this machine can make them; a test is skipped otherwise.
  bool available() const { return available_; }

  /// The address on the cable of host 0 or 1.
  static std::string address(int host);
  static std::string address6(int host);

  /// The command that runs `command` on host 0 or 1.
  std::vector<std::string> on(int host, const std::vector<std::string>& command) const;

 private:
  std::string namespace_of(int host) const;
  std::string folder_of(int host) const;

  bool available_ = false;
};

}  // namespace syncbn::test
