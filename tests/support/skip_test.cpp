// SYNCBN_SKIP_UNLESS, for tests that need something a machine may lack.
#include "support/skip.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace syncbn::test {
namespace {

class SkipTest : public ::testing::Test {
 protected:
  // Each test runs in its own process, so nothing has to be restored.
  static void set(const char* ci, const char* allowed) {
    ::setenv("CI", ci, 1);
    ::setenv("SYNCBN_ALLOW_SKIP", allowed, 1);
  }
};

TEST_F(SkipTest, IsAllowedOnAUsersMachine) {
  set("", "");
  EXPECT_TRUE(may_skip("netns"));
}

TEST_F(SkipTest, HasToBeAllowedByItsWholeNameInCi) {
  set("true", "");
  EXPECT_FALSE(may_skip("netns"));
  set("true", "gpu,netns,sshd");
  EXPECT_TRUE(may_skip("netns"));
  EXPECT_FALSE(may_skip("net"));
}

}  // namespace
}  // namespace syncbn::test
