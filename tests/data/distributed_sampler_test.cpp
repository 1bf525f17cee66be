#include <syncbn/data/distributed_sampler.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <syncbn/base/error.h>

#include "support/python.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::data {
namespace {

using Orders = std::vector<std::vector<int64_t>>;

/// The orders of all ranks.
Orders orders(int64_t size, int64_t epoch, DistributedSamplerOptions options) {
  Orders all;
  for (int rank = 0; rank < options.num_replicas.value_or(1); ++rank) {
    options.rank = rank;
    DistributedSampler sampler(size, options);
    sampler.set_epoch(epoch);
    all.push_back(sampler.indices());
    EXPECT_EQ(sampler.size(), std::ssize(all.back()));
  }
  return all;
}

// Golden values from torch 2.11.

TEST(DistributedSamplerTest, ShufflesAsPyTorchDoes) {
  EXPECT_EQ(orders(10, 0, {.num_replicas = 3}), (Orders{{4, 5, 0, 2}, {1, 3, 8, 4}, {7, 9, 6, 1}}));
}

TEST(DistributedSamplerTest, ShufflesAgainInTheNextEpoch) {
  EXPECT_EQ(orders(10, 1, {.num_replicas = 3}), (Orders{{5, 2, 9, 4}, {6, 0, 3, 5}, {1, 8, 7, 6}}));
}

TEST(DistributedSamplerTest, LeavesOutTheUnevenTailWithDropLast) {
  EXPECT_EQ(orders(10, 0, {.num_replicas = 3, .drop_last = true}),
            (Orders{{4, 5, 0}, {1, 3, 8}, {7, 9, 6}}));
}

TEST(DistributedSamplerTest, PadsFromTheFrontWhenUneven) {
  EXPECT_EQ(orders(10, 0, {.num_replicas = 3, .shuffle = false}),
            (Orders{{0, 3, 6, 9}, {1, 4, 7, 0}, {2, 5, 8, 1}}));
}

TEST(DistributedSamplerTest, RepeatsSamplesWhenThereAreFewerThanRanks) {
  EXPECT_EQ(orders(2, 0, {.num_replicas = 5, .shuffle = false}), (Orders{{0}, {1}, {0}, {1}, {0}}));
}

TEST(DistributedSamplerTest, IsEmptyWithDropLastWhenThereAreFewerSamplesThanRanks) {
  EXPECT_EQ(orders(2, 0, {.num_replicas = 5, .shuffle = false, .drop_last = true}),
            (Orders{{}, {}, {}, {}, {}}));
}

TEST(DistributedSamplerTest, IsEmptyForAnEmptyDataSet) {
  EXPECT_EQ(orders(0, 3, {.num_replicas = 2}), (Orders{{}, {}}));
}

TEST(DistributedSamplerTest, AddsSeedAndEpoch) {
  EXPECT_EQ(orders(100, 5, {.seed = 7}), orders(100, 0, {.seed = 12}));
  EXPECT_NE(orders(100, 5, {.seed = 7}), orders(100, 5, {.seed = 8}));
}

TEST(DistributedSamplerTest, RefusesARankOutsideTheWorld) {
  EXPECT_THROW(DistributedSampler(10, {.num_replicas = 3, .rank = 3}), base::UserError);
  EXPECT_THROW(DistributedSampler(10, {.num_replicas = 3, .rank = -1}), base::UserError);
  EXPECT_THROW(DistributedSampler(10, {.num_replicas = 0, .rank = 0}), base::UserError);
}

TEST(DistributedSamplerTest, RefusesANegativeSize) {
  EXPECT_THROW(DistributedSampler(-1), base::UserError);
}

struct SamplerCase {
  int64_t size, epoch;
  DistributedSamplerOptions options;
};

std::vector<SamplerCase> random_cases(size_t count) {
  std::mt19937_64 random(42);
  const auto below = [&random](int64_t bound) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
  };
  std::vector<SamplerCase> cases;
  while (cases.size() < count) {
    SamplerCase one;
    one.options.num_replicas = static_cast<int>(1 + below(9));
    one.options.rank = static_cast<int>(below(*one.options.num_replicas));
    one.options.shuffle = below(4) != 0;
    one.options.drop_last = below(2) != 0;
    one.options.seed = below(1'000'000'000'000);
    one.size = below(3) == 0 ? below(12) : below(2000);
    one.epoch = below(1000);
    cases.push_back(one);
  }
  return cases;
}

/// The number of warnings about set_epoch() in `times` calls of indices().
int warnings_of(DistributedSampler& sampler, int times) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "test", std::make_shared<spdlog::sinks::ostream_sink_st>(log)));
  for (int i = 0; i < times; ++i) sampler.indices();
  spdlog::set_default_logger(before);
  return test::count(log.str(), "set_epoch() was never called");
}

TEST(DistributedSamplerTest, WarnsOnceIfSetEpochIsNeverCalled) {
  DistributedSampler sampler(10);
  EXPECT_EQ(warnings_of(sampler, 1), 0);
  EXPECT_EQ(warnings_of(sampler, 1), 1);
  EXPECT_EQ(warnings_of(sampler, 3), 0);
  DistributedSampler with_epoch(10);
  with_epoch.set_epoch(0);
  EXPECT_EQ(warnings_of(with_epoch, 3), 0);
  DistributedSampler in_order(10, {.shuffle = false});
  EXPECT_EQ(warnings_of(in_order, 3), 0);
}

/// Python's output: the indices of one case per line.
std::string ask_python(const std::vector<SamplerCase>& cases) {
  std::string program =
      "from torch.utils.data import DistributedSampler\n"
      "def ask(size, epoch, **options):\n"
      "    sampler = DistributedSampler(range(size), **options)\n"
      "    sampler.set_epoch(epoch)\n"
      "    print(*sampler)\n";
  const auto name = [](bool on) { return on ? "True" : "False"; };
  for (const SamplerCase& one : cases) {
    program +=
        fmt::format("ask({}, {}, num_replicas={}, rank={}, shuffle={}, seed={}, drop_last={})\n",
                    one.size, one.epoch, *one.options.num_replicas, *one.options.rank,
                    name(one.options.shuffle), one.options.seed, name(one.options.drop_last));
  }
  const std::string command = test::python() + " - <<'END'\n" + program + "END\n";
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string output;
  for (int c = fgetc(pipe.get()); c != EOF; c = fgetc(pipe.get())) {
    output.push_back(static_cast<char>(c));
  }
  return output;
}

TEST(DistributedSamplerTest, AgreesWithPythonInTwoHundredRandomCases) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto cases = random_cases(200);
  std::istringstream answers(ask_python(cases));
  for (const SamplerCase& one : cases) {
    DistributedSampler sampler(one.size, one.options);
    sampler.set_epoch(one.epoch);
    std::string line;
    ASSERT_TRUE(std::getline(answers, line));
    EXPECT_EQ(fmt::format("{}", fmt::join(sampler.indices(), " ")), line)
        << "size " << one.size << " epoch " << one.epoch << " replicas "
        << *one.options.num_replicas << " rank " << *one.options.rank << " seed "
        << one.options.seed << " shuffle " << one.options.shuffle << " drop_last "
        << one.options.drop_last;
  }
}

}  // namespace
}  // namespace syncbn::data
