#include "nodes/master_port.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "support/skip.h"
#include "support/thrown.h"

namespace syncbn::launch {
namespace {

// As on hosts whose address may move to them (keepalived): bind() accepts every address.
TEST(LocalAddressTest, AnAddressThatCanBeBoundNeedNotBeLocal) {
  for (const std::string& own : own_addresses()) EXPECT_TRUE(is_local_address(own)) << own;
  constexpr int kNoNamespaces = 77;
  const auto check = [] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return kNoNamespaces;
    std::ofstream setting("/proc/sys/net/ipv4/ip_nonlocal_bind");
    if (!(setting << 1 << std::flush).good()) return kNoNamespaces;
    if (is_local_address("192.0.2.1")) return 1;  // TEST-NET-1: no host has it
    for (const char* own : {"127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"}) {
      if (!is_local_address(own)) return 2;
    }
    return 0;
  };
  const pid_t child = ::fork();
  if (child == 0) ::_exit(check());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  SYNCBN_SKIP_UNLESS(WEXITSTATUS(status) != kNoNamespaces, "namespaces");
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ListenAddressTest, IsThatOfTheOptionOrALoopbackMaster) {
  const auto address = [](const std::string& master, const std::string& listen = "") {
    LaunchOptions options;
    options.master_addr = master;
    options.listen = listen;
    return listen_address(options);
  };
  const std::string foreign = "192.0.2.1";  // TEST-NET-1: no host has it
  EXPECT_EQ(address(foreign), "");
  EXPECT_EQ(address("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(address("localhost"), "127.0.0.1");
  EXPECT_EQ(address(foreign, "127.0.0.1"), "127.0.0.1");
  EXPECT_TRUE(base::is_loopback(address(foreign, "lo")));
  EXPECT_THAT(test::message_of<base::UserError>([&] { address(foreign, "no-such-interface"); }),
              testing::HasSubstr("--listen=no-such-interface: neither an address nor"));
}

}  // namespace
}  // namespace syncbn::launch
