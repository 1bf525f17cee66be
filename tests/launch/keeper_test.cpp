#include "workers/keeper.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

#include "common/processes.h"
#include "support/eventually.h"

namespace syncbn::launch {
namespace {

TEST(KeeperTest, AnExceptionInItDoesNotReachTheLaunchersCode) {
  std::optional<Keeper> keeper;
  try {
    keeper.emplace(std::vector<WorkerSpec>{}, [] { throw std::runtime_error("in the keeper"); });
  } catch (const std::runtime_error&) {
    ::_exit(0);  // this is the keeper, in the launcher's frames
  }
  keeper.reset();  // closes the socket, as if the launcher had ended
  // A keeper that had unwound into our frames would exit with 0, and so would its sentinel.
  const pid_t sentinel = children_of(::getpid()).at(0);
  EXPECT_TRUE(syncbn::test::eventually([sentinel] { return children_of(sentinel).empty(); }));
  // A sentinel that did not wait would have ended by then.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(::waitpid(sentinel, nullptr, WNOHANG), 0) << "it waits for our end";
  kill_all_descendants();
}

}  // namespace
}  // namespace syncbn::launch
