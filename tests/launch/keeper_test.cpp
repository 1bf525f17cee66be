#include "workers/keeper.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <stdexcept>

namespace syncbn::launch {
namespace {

TEST(KeeperTest, AnExceptionInItDoesNotReachTheLaunchersCode) {
  std::optional<Keeper> keeper;
  try {
    keeper.emplace(std::vector<WorkerSpec>{}, [] { throw std::runtime_error("in the keeper"); });
  } catch (const std::runtime_error&) {
    ::_exit(0);  // this is the keeper, with the launcher's frames
  }
  const pid_t pid = keeper->pid();
  keeper.reset();  // closes the socket, as if the launcher had ended
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) << status;
}

}  // namespace
}  // namespace syncbn::launch
