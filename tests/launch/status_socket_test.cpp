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

TEST(JobStatusTest, IsShownInWords) {
  JobStatus status{{.workers = {}, .notes = {"node 1 (b) does not answer"}},
                   "job",
                   "a1",
                   7,
                   2,
                   1,
                   "runs",
                   "train x"};
  EXPECT_EQ(nlohmann::json(status).get<JobStatus>().in_words(),
            "job job (a1), launcher 7, attempt 2, 1 node: runs\nprogram: train x\nnode 1 (b) does "
            "not answer\n");
  status.run_id = "a1";
  status.notes.clear();
  status.workers = {{.rank = 0, .host = "a", .pid = 8, .process = "S"}};
  EXPECT_EQ(status.in_words(),
            "job a1, launcher 7, attempt 2, 1 node: runs\nprogram: train x\n"
            " rank  host       pid  process             step  last record  doing\n"
            "    0  a            8  sleeping               -            -  \n");
}

TEST(StatusServerTest, LaunchersOfTwoContainersMayHaveTheSamePid) {
  sockaddr_un address{};
  socket_address("syncbn-test/", 7, address);
  const std::string container = std::filesystem::read_symlink("/proc/self/ns/pid");
  EXPECT_EQ(address.sun_path + 1, "syncbn-test/" + container + "/7");
}

}  // namespace
}  // namespace syncbn::launch
