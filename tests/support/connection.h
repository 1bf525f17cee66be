#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <syncbn/base/unique_fd.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
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

/// Receives until the other side closes, or until `size` bytes have arrived; at most 100 s.
inline std::string receive(const base::UniqueFd& fd, size_t size = SIZE_MAX) {
  std::string text;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  while (text.size() < size && std::chrono::steady_clock::now() < deadline) {
    pollfd ready{fd.get(), POLLIN, 0};
    if (::poll(&ready, 1, 100) <= 0) continue;
    char byte = 0;
    if (::recv(fd.get(), &byte, 1, 0) <= 0) break;
    text += byte;
  }
  return text;
}

/// Receives a line, and returns it without its end; "" if none arrives.
inline std::string receive_line(const base::UniqueFd& fd) {
  std::string line;
  for (std::string byte; byte != "\n"; line += byte) {
    byte = receive(fd, 1);
    if (byte.empty()) break;
  }
  if (!line.empty()) line.pop_back();
  return line;
}

}  // namespace syncbn::test
