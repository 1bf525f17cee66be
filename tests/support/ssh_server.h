#pragma once

#include <memory>
#include <string>
#include <vector>

#include "support/program.h"
#include "support/temp_folder.h"

namespace syncbn::test {

/// A real sshd on a free port of 127.0.0.1 and 127.0.0.2, which stand for two machines. Its keys
/// and configuration are in a temporary folder. It accepts logins of the test's user.
class SshServer {
 public:
  SshServer();

  /// Whether this machine can run it. Tests are skipped otherwise ("sshd").
  bool available() const { return available_; }

  int port() const { return port_; }
  /// The private key with which the test's user can log in.
  std::string identity() const { return folder_ / "user"; }
  /// ssh's options for this server, which make ssh ignore the user's own configuration.
  std::string options() const;

 private:
  bool make_key(const std::string& name) const;

  TempFolder folder_;
  int port_ = 0;
  std::unique_ptr<Program> sshd_;
  bool available_ = false;
};

}  // namespace syncbn::test
