#include "rendezvous/backend_choice.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace syncbn::dist::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Ranks 0, 1, … that ask for the same backend.
std::vector<Offer> offers(const std::string& backend, const std::vector<std::string>& gpus) {
  std::vector<Offer> all;
  for (const std::string& gpu : gpus) {
    const int rank = static_cast<int>(all.size());
    all.push_back({rank, backend, gpu, fmt::format("host h{}", rank)});
  }
  return all;
}

TEST(BackendChoiceTest, AutoTakesNcclWhereEachRankHasItsOwnGpu) {
  // Two machines, whose GPUs have the same addresses.
  const auto all = offers("auto", {"m 01:00.0", "m 02:00.0", "n 01:00.0", "n 02:00.0"});
  EXPECT_EQ(choose_backend(all).backend, "nccl");
  EXPECT_EQ(choose_backend(all).message, "");
  EXPECT_EQ(choose_backend(offers("auto", {"m 01:00.0"})).backend, "nccl");
}

TEST(BackendChoiceTest, AutoWithoutGpusIsGlooInSilence) {
  const auto choice = choose_backend(offers("auto", {kNoGpu, kNoGpu}));
  EXPECT_EQ(choice.backend, "gloo");
  EXPECT_EQ(choice.message, "");
}

TEST(BackendChoiceTest, AutoWithMoreRanksThanGpusLeavesThemUnusedAndSaysSo) {
  const auto one_gpu = choose_backend(offers("auto", {"m 01:00.0", "m 01:00.0"}));
  EXPECT_EQ(one_gpu.backend, "gloo");
  EXPECT_THAT(one_gpu.message, HasSubstr("leaves the GPUs unused: rank 0 on host h0 and rank 1 on "
                                         "host h1 share the GPU 01:00.0;"));
  const auto two_gpus = choose_backend(offers("auto", {"m 01:00.0", "m 02:00.0", kTooFewGpus}));
  EXPECT_EQ(two_gpus.backend, "gloo");
  EXPECT_THAT(two_gpus.message, HasSubstr("there is no GPU for rank 2 on host h2;"));
}

TEST(BackendChoiceTest, NcclRefusesTwoRanksOnOneGpu) {
  const auto choice = choose_backend(offers("nccl", {"m 01:00.0", "m 02:00.0", "m 01:00.0"}));
  EXPECT_EQ(choice.backend, "");
  EXPECT_THAT(choice.message,
              AllOf(HasSubstr("rank 0 on host h0 and rank 2 on host h2 share the GPU 01:00.0, and "
                              "NCCL takes one rank per GPU"),
                    HasSubstr("backend cuda:gloo")));
  EXPECT_EQ(choose_backend(offers("cuda:gloo", {"m 01:00.0", "m 01:00.0"})).backend, "cuda:gloo");
}

// Rarely intended: usually the driver of one host does not work.
TEST(BackendChoiceTest, RefusesAHostWithoutGpusBesideOthers) {
  for (const char* backend : {"auto", "nccl"}) {
    const auto choice = choose_backend(offers(backend, {"m 01:00.0", kNoGpu}));
    EXPECT_EQ(choice.backend, "");
    EXPECT_THAT(choice.message,
                HasSubstr("rank 1 on host h1 sees no GPU and rank 0 on host h0 does"));
  }
}

TEST(BackendChoiceTest, AutoFollowsTheOthersWhichMustAgree) {
  auto all = offers("auto", {"m 01:00.0", "m 02:00.0", "m 03:00.0"});
  all[1].backend = "gloo";
  EXPECT_EQ(choose_backend(all).backend, "gloo");
  all[2].backend = "nccl";
  const auto choice = choose_backend(all);
  EXPECT_EQ(choice.backend, "");
  EXPECT_THAT(choice.message, HasSubstr("rank 1 on host h1 asks for backend gloo and rank 2 on "
                                        "host h2 for nccl"));
  all[1].backend = all[2].backend;
  EXPECT_EQ(choose_backend(all).backend, "nccl");
}

}  // namespace
}  // namespace syncbn::dist::detail
