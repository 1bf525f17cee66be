#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/command.h>
#include <syncbn/train/config.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "data/noise.h"
#include "records/data_wait.h"
#include "support/multiproc.h"
#include "support/temp_folder.h"
#include "support/text.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

TEST(LongestWaitTest, IsTheMaximumOverRanks) {
  test::run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto wait = longest({.seconds = rank == 1 ? 4.0 : 1.0, .share = 0.25 * rank});
    EXPECT_EQ(wait.seconds, 4);
    EXPECT_EQ(wait.share, 0.5);
    dist::destroy_process_group();
  });
}

/// Image 5 never arrives on rank 1.
class Hanging : public test::Noise {
 public:
  Hanging()
      : Noise(8, [](int64_t index) {
          while (index == 5 && base::env("RANK") == "1") ::pause();
        }) {}
  std::vector<int64_t> sample_shape() const override { return {3, 8, 8}; }
};

struct HangingOptions {
  static void describe(config::Schema<HangingOptions>&) {}
};

TEST(LoaderTimeoutTest, EndsTheRunOnAllRanksWhileAWorkerHangs) {
  data::DatasetKind::registry().add<HangingOptions>(
      "hanging", "hangs", [](const HangingOptions&, data::Split split) {
        return split == data::Split::kVal ? nullptr : std::make_shared<const Hanging>();
      });
  const test::TempFolder folder;
  const std::string config = folder.write("hanging.yaml", R"(
batch_size: 8
model: {type: digits, width: 4}
data: {type: hanging}
sampler: {type: distributed, shuffle: false}
loader: {num_workers: 2, timeout: 5}
)");
  const auto ranks = test::run_ranks_and_collect({.world_size = 2}, [&](int /*rank*/) {
    // exit(), as after main() returns, while a thread still hangs.
    std::exit(base::run_main("train", [&] {
      return run_command({"--config", config, "--run_dir", folder / "run"});
    }));
  });
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank.exit_code, base::kExitUnavailable) << rank.output;
    EXPECT_EQ(test::count(rank.output, "train: error: "), 1) << rank.output;
  }
  EXPECT_THAT(ranks[0].output, HasSubstr("rank 1 "));
  EXPECT_THAT(ranks[1].output, HasSubstr("no batch for 5.0 s: sample 5 (file-5) is not ready"));
}

}  // namespace
}  // namespace syncbn::train
