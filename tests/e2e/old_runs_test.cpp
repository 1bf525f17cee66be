// Runs that users have: fixtures/digits was written by version 0.1.0 at f9217ccf, with
//   train --config configs/digits.yaml --model.width=2 --ema.decay=0.9 --epochs=1 --run_dir=digits
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/train/checkpoint.h>

#include <filesystem>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

class OldRunTest : public ::testing::Test {
 protected:
  OldRunTest() {
    std::filesystem::copy(SYNCBN_SOURCE_DIR "/tests/e2e/fixtures/digits", run_);
  }

  static train::Checkpoint load(const std::filesystem::path& path) {
    return train::parse_checkpoint(base::read_file(path), path);
  }

  const TempFolder folder_;
  const std::string run_ = folder_ / "digits";
};

TEST_F(OldRunTest, GoesOn) {
  const train::Checkpoint before = load(run_ + "/last.pt");
  EXPECT_FALSE(before.ema.empty());
  const auto resumed = run_train({"--config", run_ + "/config.yaml", "--epochs=2"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("epoch 2/2"));
  const train::Checkpoint after = load(run_ + "/last.pt");
  EXPECT_EQ(after.step, 2 * before.step);
  EXPECT_EQ(after.optimizer.size(), before.optimizer.size());
  EXPECT_EQ(result_of(run_)["epochs"], 2);
}

TEST_F(OldRunTest, IsEvaluatedAndCompared) {
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"eval", run_}, {"report", run_}, {"compare", run_, run_}}) {
    const auto done = run_train(command);
    EXPECT_EQ(done.exit_code, 0) << command.front() << "\n" << done.err;
    EXPECT_THAT(done.out + done.err, HasSubstr("94.51 %")) << command.front();
  }
}

}  // namespace
}  // namespace syncbn::test
