#include <syncbn/data/repeated_augmentation_sampler.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include <syncbn/base/error.h>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Options = RepeatedAugmentationSamplerOptions;

TEST(RepeatedAugmentationSamplerTest, GivesARepeatToEachRankAtOnce) {
  const auto order = [](int rank) {
    const RepeatedAugmentationSampler sampler(
        6, {.num_replicas = 3, .rank = rank, .shuffle = false, .selected_round = 0});
    return sampler.indices();
  };
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(order(rank), ElementsAre(0, 1));
}

TEST(RepeatedAugmentationSamplerTest, TellsRepeatsApart) {
  for (int rank = 0; rank < 2; ++rank) {
    const RepeatedAugmentationSampler sampler(4, {.num_replicas = 2,
                                                  .rank = rank,
                                                  .shuffle = false,
                                                  .selected_ratio = 1,
                                                  .selected_round = 0});
    // All: 0 0 0 1 1 1 2 2 2 3 3 3, of which ranks take every other.
    if (rank == 0) {
      EXPECT_THAT(sampler.indices(), ElementsAre(0, 0, 1, 2));
      EXPECT_THAT(sampler.earlier_draws(), ElementsAre(0, 2, 1, 0));
    } else {
      EXPECT_THAT(sampler.indices(), ElementsAre(0, 1, 1, 2));
      EXPECT_THAT(sampler.earlier_draws(), ElementsAre(1, 0, 2, 1));
    }
  }
}

// What the sampler of DeiT and timm does, in its own terms.
constexpr char kReference[] = R"(
import math, torch
def order(size, replicas, rank, epoch, repeats, ratio, rounded):
    order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()
    order = [index for index in order for _ in range(repeats)]
    total = math.ceil(len(order) / replicas) * replicas
    order += order[:total - len(order)]
    ratio = ratio or replicas
    kept = size // rounded * rounded // ratio if rounded else math.ceil(size / ratio)
    print(*order[rank:total:replicas][:kept])
for case in [(1000, 4, 1, 3, 3, 0, 256), (1000, 4, 3, 5, 2, 0, 0), (300, 7, 6, 0, 3, 3, 0)]:
    order(*case)
)";

TEST(RepeatedAugmentationSamplerTest, HasTheOrderThatPythonsHas) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto python = test::run_program({test::python(), "-c", kReference});
  ASSERT_EQ(python.exit_code, 0) << python.err;
  std::istringstream lines(python.out);
  const auto expect_next = [&lines](int64_t size, int64_t epoch, const Options& options) {
    RepeatedAugmentationSampler sampler(size, options);
    sampler.set_epoch(epoch);
    std::string line;
    std::getline(lines, line);
    EXPECT_EQ(fmt::format("{}", fmt::join(sampler.indices(), " ")), line);
    EXPECT_EQ(sampler.size(), std::ssize(sampler.indices()));
  };
  expect_next(1000, 3, {.num_replicas = 4, .rank = 1});
  expect_next(1000, 5, {.num_replicas = 4, .rank = 3, .num_repeats = 2, .selected_round = 0});
  expect_next(300, 0, {.num_replicas = 7, .rank = 6, .selected_ratio = 3, .selected_round = 0});
}

TEST(RepeatedAugmentationSamplerTest, RefusesAnEpochWithoutSamples) {
  const auto says = [](const char* text) {
    return ThrowsMessage<base::UserError>(HasSubstr(text));
  };
  EXPECT_THAT([] { RepeatedAugmentationSampler(100, {}); },
              says("an epoch of 100 samples would be empty: cut to a multiple of "
                   "selected_round=256"));
  EXPECT_THAT([] { RepeatedAugmentationSampler(1000, {.num_repeats = 0}); },
              says("num_repeats must be at least 1, got 0"));
  EXPECT_THAT([] { RepeatedAugmentationSampler(-1, {}); }, says("-1 samples"));
  EXPECT_THAT(([] { RepeatedAugmentationSampler(1000, {.num_replicas = 2, .rank = 5}); }),
              says("rank 5 of 2"));
}

}  // namespace
}  // namespace syncbn::data
