#pragma once

#include <netinet/in.h>
#include <syncbn/base/unique_fd.h>
#include <sys/socket.h>

#include <string>

#include "support/eventually.h"

namespace syncbn::test {

/// Connects to a port of 127.0.0.1 as soon as a process listens there.
inline base::UniqueFd connect_to(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  base::UniqueFd fd;
  eventually([&] {
    fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      return true;
    }
    fd.reset();
    return false;
  });
  return fd;
}

/// Returns whether all bytes could be sent.
inline bool send_to(const base::UniqueFd& fd, const std::string& text) {
  return ::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

}  // namespace syncbn::test
