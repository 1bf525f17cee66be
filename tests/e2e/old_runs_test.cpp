// Runs that users have: fixtures/digits was written by version 0.1.0 at f9217ccf, with
//   train --config configs/digits.yaml --model.width=2 --ema.decay=0.9 --epochs=1 --run_dir=digits
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include <filesystem>
#include <optional>

#include "e2e/train_program.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

class OldRunTest : public ::testing::Test {
 protected:
  OldRunTest() { std::filesystem::copy(SYNCBN_SOURCE_DIR "/tests/e2e/fixtures/digits", run_); }

  const TempFolder folder_;
  const std::string run_ = folder_ / "digits";
};

TEST_F(OldRunTest, GoesOn) {
  const auto before = checkpoint_of(run_ + "/last.pt");
  EXPECT_FALSE(before.ema.empty());
  EXPECT_EQ(before.best.front().loss, std::nullopt);
  const auto resumed = run_train({"--config", run_, "--epochs=2"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("epoch 2/2"));
  const auto after = checkpoint_of(run_ + "/last.pt");
  EXPECT_EQ(after.step, 2 * before.step);
  EXPECT_EQ(after.optimizer.size(), before.optimizer.size());
  EXPECT_EQ(result_of(run_)["epochs"], 2);
  EXPECT_GT(result_of(run_)["test_accuracy"], 0.7) << "of a network that began at 0.77";
  const std::string table = base::read_file(run_ + "/metrics.csv");
  EXPECT_EQ(count(table, "\nepoch,"), 2) << table;
}

TEST_F(OldRunTest, IsReadByTheOtherCommands) {
  const auto evaluated = run_train({"eval", run_});
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.err;
  EXPECT_THAT(evaluated.err, HasSubstr("accuracy 76.62 %"));
  const auto reported = run_train({"report", run_});
  EXPECT_EQ(reported.exit_code, 0) << reported.err;
  EXPECT_TRUE(std::filesystem::exists(run_ + "/report.html"));
  const auto compared = run_train({"compare", run_});
  EXPECT_EQ(compared.exit_code, 0) << compared.err;
  EXPECT_THAT(compared.out, HasSubstr("76.62 %"));
  const auto exported = run_train({"export", run_, "--format=torch"});
  EXPECT_EQ(exported.exit_code, 0) << exported.err;
}

}  // namespace
}  // namespace syncbn::test
