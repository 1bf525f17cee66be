#include "job/status_socket.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <syncbn/base/channel.h>
#include <syncbn/base/socket.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

namespace syncbn::launch {
namespace {

TEST(StatusServerTest, AClientThatDoesNotReadHoldsUpNothing) {
  StatusServer server("syncbn-test/");
  base::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  const socklen_t size = socket_address("syncbn-test/", ::getpid(), address);
  ASSERT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  base::Channel client(std::move(fd));
  ASSERT_TRUE(server.handle());
  const std::string text(size_t{16} << 20, 'x');  // more than a socket holds
  server.answer(text);
  EXPECT_FALSE(base::poll_until(server.fd(), POLLIN, {})) << "nothing can be sent";
  while (!client.has_ended()) {
    client.receive(SIZE_MAX);
    EXPECT_TRUE(client.input().size() == text.size() || base::poll_until(server.fd(), POLLIN, {}));
    server.handle();
  }
  EXPECT_EQ(client.input(), text);
}

TEST(StatusServerTest, LaunchersOfTwoContainersMayHaveTheSamePid) {
  sockaddr_un address{};
  socket_address("syncbn-test/", 7, address);
  const std::string container = std::filesystem::read_symlink("/proc/self/ns/pid");
  EXPECT_EQ(address.sun_path + 1, "syncbn-test/" + container + "/7");
}

}  // namespace
}  // namespace syncbn::launch
