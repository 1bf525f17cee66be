#include <gmock/gmock.h>
#include <signal.h>

#include "job/restart_policy.h"

namespace syncbn::launch {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Clock::time_point kStart{std::chrono::hours(1)};

constexpr int kExit1 = 1 << 8;  // a wait status
const FailureCause kCause{0, kExit1, -1};

TEST(RestartPolicyTest, CountsTheRestartsWithinATime) {
  RestartPolicy policy(2, std::chrono::hours(1));
  const auto refusal_after = [&](int minutes) {
    policy.failed(kCause, kStart + std::chrono::minutes(minutes));
    return policy.refusal();
  };
  for (const int minutes : {0, 50}) {
    EXPECT_EQ(refusal_after(minutes), "");
    policy.restart();
  }
  EXPECT_EQ(refusal_after(59), "no restart is left (--max_restarts=2 within 1 h 0 min)");
  EXPECT_EQ(refusal_after(61), "");
  policy.restart();
  EXPECT_THAT(refusal_after(62), HasSubstr("no restart is left"));
}

TEST(RestartPolicyTest, WaitsLongerAfterEachQuickFailureAndNotAfterALateOne) {
  RestartPolicy policy(100, seconds(0));
  const auto wait_after = [&](int seconds_of_attempt) {
    policy.attempt_started(kStart);
    policy.failed(kCause, kStart + seconds(seconds_of_attempt));
    return policy.restart().count();
  };
  std::vector<int64_t> waits;
  for (int i = 0; i < 9; ++i) waits.push_back(wait_after(1));
  EXPECT_THAT(waits, ElementsAre(0, 500, 1000, 2000, 4000, 8000, 16'000, 30'000, 30'000));
  EXPECT_EQ(wait_after(61), 0);
  EXPECT_EQ(wait_after(1), 0);
}

TEST(FailureCauseTest, IsPutInWords) {
  EXPECT_EQ((FailureCause{2, kExit1, 7}.describe()), "rank 2 failed (exit code 1)");
  EXPECT_EQ((FailureCause{2, SIGKILL, 7}.describe()), "rank 2 failed (no progress)");
  EXPECT_EQ((FailureCause{2, SIGKILL, -1}.describe()),
            "rank 2 failed (killed by signal 9 (SIGKILL, Killed))");
}

TEST(RestartPolicyTest, StopsWhenTheSameFailureRepeatsAtTheSameStep) {
  RestartPolicy policy(100, seconds(0));
  const FailureCause same{1, kExit1, 7};
  const auto fail = [&](const FailureCause& cause) { policy.failed(cause, kStart); };
  fail(same);
  fail(same);
  EXPECT_EQ(policy.refusal(), "");
  fail({1, kExit1, 8});  // another step
  fail(same);
  fail({0, kExit1, 7});  // another rank
  fail(same);
  fail(same);
  EXPECT_EQ(policy.refusal(), "");
  fail(same);
  EXPECT_EQ(policy.refusal(),
            "rank 1 failed (exit code 1) 3 times in a row at step 7: a restart does not help");
  // Killed from outside: the cause may differ each time.
  for (int i = 0; i < 20; ++i) fail({1, SIGKILL, -1});
  EXPECT_EQ(policy.refusal(), "");
}

TEST(RestartPolicyTest, StopsLaterWhenTheSameFailureRepeatsBeforeTheFirstStep) {
  RestartPolicy policy(100, seconds(0));
  const FailureCause same{1, kExit1, 0};
  const auto fail = [&](const FailureCause& cause, seconds after) {
    policy.attempt_started(kStart);
    policy.failed(cause, kStart + after);
  };
  for (int i = 0; i < 9; ++i) fail(same, seconds(1));
  EXPECT_EQ(policy.refusal(), "");
  fail({1, 4 << 8, 0}, seconds(1));
  for (int i = 0; i < 9; ++i) fail(same, seconds(1));
  EXPECT_EQ(policy.refusal(), "");
  fail(same, seconds(1));
  EXPECT_EQ(policy.refusal(),
            "rank 1 failed (exit code 1) 10 times in a row before its first step: a restart does "
            "not help");
  // A program that reports no steps, but has run for a while.
  for (int i = 0; i < 20; ++i) fail(same, seconds(60));
  EXPECT_EQ(policy.refusal(), "");
}

}  // namespace
}  // namespace syncbn::launch
