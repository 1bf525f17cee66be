#include "support/ssh_server.h"

#include <fmt/format.h>

#include <filesystem>

#include "support/multiproc.h"

namespace syncbn::test {

namespace fs = std::filesystem;

SshServer::SshServer() : port_(free_port()) {
  // sshd executes itself for each connection, and requires an absolute path.
  const std::string sshd = "/usr/sbin/sshd";
  if (!fs::exists(sshd) || !make_key("host") || !make_key("user")) return;
  // As root, sshd needs this folder for privilege separation.
  std::error_code ignored;
  fs::create_directories("/run/sshd", ignored);
  const std::string config =
      folder_.write("sshd_config", fmt::format("Port {}\n"
                                               "ListenAddress 127.0.0.1\n"
                                               "ListenAddress 127.0.0.2\n"
                                               "HostKey {}\n"
                                               "AuthorizedKeysFile {}\n"
                                               "PidFile none\n"
                                               "StrictModes no\n"
                                               "UsePAM no\n"
                                               "PermitRootLogin yes\n"
                                               "PasswordAuthentication no\n"
                                               "MaxStartups 100\n",
                                               port_, (folder_ / "host").string(),
                                               (folder_ / "user.pub").string()));
  sshd_ = std::make_unique<Program>(std::vector<std::string>{sshd, "-D", "-e", "-f", config});
  available_ = sshd_->wait_for_err("listening on 127.0.0.1");
}

std::string SshServer::options() const {
  return fmt::format("-F none -o StrictHostKeyChecking=no -o UserKnownHostsFile={}",
                     (folder_ / "known").string());
}

bool SshServer::make_key(const std::string& name) const {
  return run_program({"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder_ / name})
             .exit_code == 0;
}

}  // namespace syncbn::test
