#include "records/progress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <syncbn/base/log.h>
#include <syncbn/base/unique_fd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

namespace syncbn::train {
namespace {

class AgentChannelTest : public ::testing::Test {
 protected:
  AgentChannelTest() {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    reader_.reset(ends[0]);
    // A worker inherits a descriptor that stays open across exec.
    writer_ = ends[1];
    ::fcntl(writer_, F_SETFD, 0);
    ::setenv("SYNCBN_AGENT_FD", std::to_string(writer_).c_str(), 1);
  }

  std::vector<syncbn_agent_record> received() {
    std::vector<syncbn_agent_record> records;
    syncbn_agent_record record;
    while (::read(reader_.get(), &record, sizeof(record)) == sizeof(record)) {
      EXPECT_EQ(record.magic, SYNCBN_AGENT_MAGIC);
      EXPECT_EQ(record.version, SYNCBN_AGENT_VERSION);
      records.push_back(record);
    }
    return records;
  }

  base::UniqueFd reader_;
  int writer_ = -1;
};

TEST_F(AgentChannelTest, AdoptsTheDescriptorAndSaysHello) {
  AgentChannel channel(3);
  EXPECT_TRUE(channel);
  EXPECT_EQ(::getenv("SYNCBN_AGENT_FD"), nullptr);
  EXPECT_TRUE(::fcntl(writer_, F_GETFD) & FD_CLOEXEC);
  const auto records = received();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].kind, SYNCBN_AGENT_HELLO);
  EXPECT_EQ(records[0].rank, 3);
}

TEST_F(AgentChannelTest, SendsProgressAndClear) {
  AgentChannel channel(0);
  channel.send(SYNCBN_AGENT_PROGRESS, 5, 10, "epoch 1/2");
  channel.send(SYNCBN_AGENT_CLEAR);
  const auto records = received();
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[1].kind, SYNCBN_AGENT_PROGRESS);
  EXPECT_EQ(records[1].done, 5u);
  EXPECT_EQ(records[1].total, 10u);
  EXPECT_STREQ(records[1].text, "epoch 1/2");
  EXPECT_EQ(records[2].kind, SYNCBN_AGENT_CLEAR);
}

TEST_F(AgentChannelTest, CutsLongTextBetweenCharacters) {
  AgentChannel channel(0);
  // 215 bytes fit, so the two-byte character would be cut in the middle.
  channel.send(SYNCBN_AGENT_PROGRESS, 0, 0, std::string(214, 'x') + "\xc3\xa4");
  EXPECT_EQ(std::string(received().back().text), std::string(214, 'x'));
}

TEST_F(AgentChannelTest, ItsEndReportsTheLastSteps) {
  {
    AgentChannel channel(0);
    channel.heartbeat(1);
    channel.heartbeat(2);
    channel.heartbeat(3);
  }
  const auto records = received();
  ASSERT_GE(records.size(), 4u);
  EXPECT_EQ(records[2].done, 1u);
  EXPECT_EQ(records.back().done, 3u);
}

TEST_F(AgentChannelTest, APhaseAsksForTimeAndTellsThatItGoesOn) {
  AgentChannel channel(0);
  channel.phase("evaluation", std::chrono::minutes(2));
  for (int i = 0; i < 100; ++i) channel.phase_goes_on("evaluation");  // at most once a second
  const auto records = received();
  ASSERT_GE(records.size(), 3u);
  EXPECT_LT(records.size(), 50u);
  EXPECT_EQ(records[1].kind, SYNCBN_AGENT_PHASE);
  EXPECT_EQ(records[1].done, 120'000u);
  EXPECT_EQ(records[2].done, 0u);
  EXPECT_STREQ(records[2].text, "evaluation");
}

TEST_F(AgentChannelTest, TheFirstStepAfterAPhaseEndsItsAllowance) {
  AgentChannel channel(0);
  channel.heartbeat(1);
  channel.phase("checkpoint", std::chrono::minutes(2));
  channel.heartbeat(2);
  const auto records = received();
  EXPECT_EQ(records.back().kind, SYNCBN_AGENT_HEARTBEAT);
  EXPECT_EQ(records.back().done, 2u);
}

TEST_F(AgentChannelTest, SendsHeartbeatsAtMostOnceASecond) {
  AgentChannel channel(0);
  for (uint64_t step = 1; step <= 100; ++step) channel.heartbeat(step);
  const auto records = received();
  ASSERT_GE(records.size(), 3u);
  EXPECT_LT(records.size(), 50u);
  EXPECT_EQ(records[2].kind, SYNCBN_AGENT_HEARTBEAT);
  EXPECT_EQ(records[2].done, 1u);
}

TEST_F(AgentChannelTest, TheFirstStepAsksForAHangTimeout) {
  using std::chrono::milliseconds;
  using std::chrono::minutes;
  EXPECT_EQ(AgentChannel::hang_timeout(milliseconds(3)), minutes(10));
  EXPECT_EQ(AgentChannel::hang_timeout(minutes(2)), minutes(40));
  AgentChannel channel(0);
  channel.phase("evaluation", minutes(0));  // before the first step there is no timeout
  for (const auto& record : received()) EXPECT_NE(record.kind, SYNCBN_AGENT_TIMEOUT);
  for (uint64_t step = 1; step <= 100; ++step) channel.heartbeat(step);
  const auto records = received();
  EXPECT_EQ(records.at(0).kind, SYNCBN_AGENT_TIMEOUT);
  EXPECT_EQ(records.at(0).done, 600'000u);
  for (size_t i = 1; i < records.size(); ++i) EXPECT_NE(records[i].kind, SYNCBN_AGENT_TIMEOUT);
}

TEST_F(AgentChannelTest, DropsWhatAFullPipeCannotTake) {
  AgentChannel channel(0);
  for (int i = 0; i < 10'000; ++i) channel.send(SYNCBN_AGENT_PROGRESS, 1, 2, "full");
  EXPECT_LT(received().size(), 10'000u);
  channel.send(SYNCBN_AGENT_PROGRESS, 7, 8, "room again");
  EXPECT_EQ(received().at(0).done, 7u);
}

TEST_F(AgentChannelTest, ProgressWritesEveryLineInOrder) {
  AgentChannel channel(0);
  base::init_logging(0);
  ::testing::internal::CaptureStderr();
  {
    Progress progress(channel);
    for (int64_t step = 1; step <= 3; ++step) progress.log(step, 5, "loss 0.5");
    progress.clear();
    spdlog::info("epoch 1");
    for (int64_t step = 4; step <= 5; ++step) progress.log(step, 5, "loss 0.25");
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "I step 1/5   20 %  loss 0.5  0:00\nI step 2/5   40 %  loss 0.5  0:00\n"
            "I step 3/5   60 %  loss 0.5  0:00\nI epoch 1\n"
            "I step 4/5   80 %  loss 0.25  0:00\nI step 5/5  100 %  loss 0.25  0:00\n");
}

TEST_F(AgentChannelTest, ProgressIsLinesWhereTheLauncherDrawsNoBar) {
  AgentChannel channel(0);
  base::init_logging(0);
  const auto lines = [&](std::chrono::milliseconds interval, bool as_line = true) {
    ::testing::internal::CaptureStderr();
    {
      Progress(channel, interval)
          .show(
              1, 2, [] { return "loss 0.5"; }, as_line);
    }
    return ::testing::internal::GetCapturedStderr();
  };
  const std::chrono::milliseconds at_once{0};
  EXPECT_EQ(lines(at_once), "I step 1/2   50 %  loss 0.5  0:00\n");
  EXPECT_EQ(lines(std::chrono::hours(1)), "");
  EXPECT_EQ(lines(at_once, /*as_line=*/false), "");
  ::setenv("SYNCBN_AGENT_BAR", "1", 1);
  EXPECT_EQ(lines(at_once), "");
  ::unsetenv("SYNCBN_AGENT_BAR");
}

TEST_F(AgentChannelTest, AsksForTheTextOnlyWhereItIsShown) {
  AgentChannel channel(0);
  Progress progress(channel);
  int asked = 0;
  for (int64_t step = 1; step <= 1000; ++step) {
    progress.show(step, 1000, [&] { return fmt::format("asked {} times", ++asked); });
  }
  EXPECT_GE(asked, 1);
  EXPECT_LT(asked, 100);
  EXPECT_STREQ(received().at(1).text, "asked 1 times");
}

TEST(AgentChannelWithoutLauncherTest, DoesNothing) {
  ::unsetenv("SYNCBN_AGENT_FD");
  AgentChannel channel(0);
  EXPECT_FALSE(channel);
  channel.send(SYNCBN_AGENT_PROGRESS, 1, 2, "nobody listens");
  channel.send(SYNCBN_AGENT_CLEAR);
}

TEST(AgentChannelWithoutLauncherTest, IgnoresADescriptorThatIsNotThereOrNoPipe) {
  ::setenv("SYNCBN_AGENT_FD", "987", 1);
  EXPECT_FALSE(AgentChannel(0));
  const base::UniqueFd file(::memfd_create("somebody's", MFD_CLOEXEC));
  ::setenv("SYNCBN_AGENT_FD", std::to_string(file.get()).c_str(), 1);
  EXPECT_FALSE(AgentChannel(0));
  EXPECT_EQ(::lseek(file.get(), 0, SEEK_END), 0) << "nothing is written to it";
}

}  // namespace
}  // namespace syncbn::train
