#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>
#include <sstream>

#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/loader.h>

#include "data/noise.h"
#include "support/text.h"

namespace syncbn::data {
namespace {

using test::labels_of;
using test::Noise;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(LoaderOptionsTest, DividesTheGlobalBatchSize) {
  const auto dataset = std::make_shared<Noise>(24);
  const auto sampler = std::make_shared<DistributedSampler>(
      24, DistributedSamplerOptions{.num_replicas = 3, .rank = 1});
  Loader loader(dataset, sampler, {.global_batch_size = 12});
  loader.start_epoch(0);
  EXPECT_EQ(loader.next()->size(), 4);
  const auto refuses = [&](const LoaderOptions& options, const char* why) {
    EXPECT_THAT(([&] { Loader(dataset, sampler, options); }),
                ThrowsMessage<base::UserError>(HasSubstr(why)));
  };
  refuses({.batch_size = 4, .global_batch_size = 12}, "both given");
  refuses({.global_batch_size = 10}, "not a multiple of the 3 ranks");
  refuses({.global_batch_size = 0}, "not a multiple");
  refuses({.num_workers = -2}, "num_workers");
  refuses({.prefetch = 0}, "prefetch");
  refuses({.error_budget = 1.5}, "error_budget");
}

TEST(LoaderOptionsTest, RefusesASamplerTogetherWithShuffle) {
  for (const bool shuffle : {true, false}) {
    EXPECT_THAT(([&] {
                  Loader(std::make_shared<Noise>(4), std::make_shared<DistributedSampler>(4),
                         {.shuffle = shuffle});
                }),
                ThrowsMessage<base::UserError>(HasSubstr("sampler together with shuffle")));
  }
}

TEST(LoaderOptionsTest, ShufflesWithoutASamplerIfAsked) {
  Loader plain(std::make_shared<Noise>(6), {.batch_size = 6});
  plain.start_epoch(1);
  EXPECT_THAT(labels_of(*plain.next()), ElementsAre(0, 1, 2, 3, 4, 5));
  Loader shuffled(std::make_shared<Noise>(6), {.batch_size = 6, .shuffle = true, .seed = 4});
  shuffled.start_epoch(1);
  DistributedSampler expected(6, {.seed = 4});
  expected.set_epoch(1);
  EXPECT_EQ(labels_of(*shuffled.next()), expected.indices());
}

TEST(LoaderOptionsTest, WithoutAGpuPinMemoryWarnsOnce) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "test", std::make_shared<spdlog::sinks::ostream_sink_st>(log)));
  for (int i = 0; i < 2; ++i) {
    Loader loader(std::make_shared<Noise>(4), {.batch_size = 4, .pin_memory = true});
    loader.start_epoch(0);
    EXPECT_EQ(labels_of(*loader.next()), (std::vector<int64_t>{0, 1, 2, 3}));
  }
  spdlog::set_default_logger(before);
  EXPECT_EQ(test::count(log.str(), "pin_memory changes nothing"), 1) << log.str();
}

TEST(LoaderOptionsTest, AutomaticWorkersShareTheHostsCores) {
  ASSERT_EQ(setenv("LOCAL_WORLD_SIZE", "10000", /*overwrite=*/1), 0);
  EXPECT_EQ(automatic_workers(), 1);
  ASSERT_EQ(setenv("LOCAL_WORLD_SIZE", "1", /*overwrite=*/1), 0);
  const int alone = automatic_workers();
  EXPECT_GE(alone, 1);
  EXPECT_LE(alone, base::usable_cpus());
  unsetenv("LOCAL_WORLD_SIZE");
  EXPECT_EQ(automatic_workers(), alone);
}

}  // namespace
}  // namespace syncbn::data
