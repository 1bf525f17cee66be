#include <fmt/format.h>
#include <syncbn/dist/ddp.h>

#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "dist/group.h"
#include "dist/whole_batch.h"

namespace {

namespace dist = syncbn::dist;
using dist::DdpOptions;
using syncbn::test::expect_accumulates_as_whole_batch;
using syncbn::test::expect_trains_as_whole_batch;
using syncbn::test::Network;
using syncbn::test::run_group;

struct NamedOptions {
  const char* name;
  DdpOptions options;
  bool own_group = false;  ///< a new group of all ranks instead of the default one
};

struct NamedNetwork {
  const char* name;
  Network network;
};

void PrintTo(const NamedOptions& given, std::ostream* stream) {
  *stream << given.name;
}

void PrintTo(const NamedNetwork& given, std::ostream* stream) {
  *stream << given.name;
}

class DdpWholeBatchTest : public ::testing::TestWithParam<std::tuple<NamedNetwork, NamedOptions>> {
};

std::string name_of(const ::testing::TestParamInfo<DdpWholeBatchTest::ParamType>& info) {
  return fmt::format("{}_{}", std::get<0>(info.param).name, std::get<1>(info.param).name);
}

TEST_P(DdpWholeBatchTest, TrainsAsOneModelOnTheWholeBatch) {
  const Network network = std::get<0>(GetParam()).network;
  const NamedOptions& given = std::get<1>(GetParam());
  for (size_t world_size = 1; world_size <= 4; ++world_size) {
    run_group(static_cast<int>(world_size), [&](int) {
      const auto alone = dist::new_subgroups(1);
      DdpOptions options = given.options;
      if (given.own_group) {
        std::vector<int> all(world_size);
        std::iota(all.begin(), all.end(), 0);
        options.process_group = dist::new_group(all);
      }
      std::vector<int64_t> uneven{3, 8, 4, 6};
      uneven.resize(world_size);
      for (const auto& shares : {std::vector<int64_t>(world_size, 5), uneven}) {
        SCOPED_TRACE(fmt::format("{} of {} ranks, {} samples on the first", dist::rank(),
                                 world_size, shares[0]));
        expect_trains_as_whole_batch(network, options, shares, alone);
      }
    });
  }
}

// Makes buckets of one or a few parameters.
constexpr double kSmallBuckets = 0.0001;

INSTANTIATE_TEST_SUITE_P(
    Options, DdpWholeBatchTest,
    ::testing::Combine(
        ::testing::Values(NamedNetwork{"Plain", Network::kPlain},
                          NamedNetwork{"BatchNorm", Network::kBatchNorm},
                          NamedNetwork{"SyncBatchNorm", Network::kSyncBatchNorm},
                          NamedNetwork{"SeveralOutputs", Network::kSeveralOutputs}),
        ::testing::Values(NamedOptions{"Defaults", {}},
                          NamedOptions{"NoInitSync", {.init_sync = false}},
                          NamedOptions{"NoBroadcastBuffers", {.broadcast_buffers = false}},
                          NamedOptions{"ManySmallBuckets", {.bucket_cap_mb = kSmallBuckets}},
                          NamedOptions{"FindUnusedParameters", {.find_unused_parameters = true}},
                          NamedOptions{"GradientAsBucketView", {.gradient_as_bucket_view = true}},
                          NamedOptions{"StaticGraph", {.static_graph = true}},
                          NamedOptions{"FirstBucket",
                                       {.bucket_cap_mb = 4 * kSmallBuckets,
                                        .first_bucket_cap_mb = kSmallBuckets}},
                          NamedOptions{"OwnGroup", {}, true},
                          NamedOptions{"AllAtOnce",
                                       {.broadcast_buffers = false,
                                        .find_unused_parameters = true,
                                        .gradient_as_bucket_view = true,
                                        .init_sync = false,
                                        .bucket_cap_mb = kSmallBuckets},
                                       true})),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    UnusedParameters, DdpWholeBatchTest,
    ::testing::Combine(
        ::testing::Values(NamedNetwork{"UnusedLayer", Network::kUnusedLayer},
                          NamedNetwork{"Branches", Network::kBranches}),
        ::testing::Values(
            NamedOptions{"FindUnusedParameters", {.find_unused_parameters = true}},
            NamedOptions{"ManySmallBuckets",
                         {.find_unused_parameters = true, .bucket_cap_mb = kSmallBuckets}},
            NamedOptions{"GradientAsBucketView",
                         {.find_unused_parameters = true, .gradient_as_bucket_view = true}})),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    UnusedInEveryStep, DdpWholeBatchTest,
    ::testing::Combine(::testing::Values(NamedNetwork{"UnusedLayer", Network::kUnusedLayer}),
                       ::testing::Values(NamedOptions{"StaticGraph", {.static_graph = true}},
                                         NamedOptions{"SkipAllReduce",
                                                      {.find_unused_parameters = true,
                                                       .skip_all_reduce_unused_params = true,
                                                       .bucket_cap_mb = kSmallBuckets}})),
    name_of);

// Every forward exchanges statistics; only the last backward exchanges gradients.
TEST(DdpAccumulationTest, OfThreeBatchesWithSyncBatchNormIsThatOfWholeBatches) {
  run_group(2, [](int) {
    const auto alone = dist::new_subgroups(1);
    for (const bool views : {false, true}) {
      SCOPED_TRACE(views);
      expect_accumulates_as_whole_batch({.gradient_as_bucket_view = views}, {3, 5}, alone);
    }
  });
}

}  // namespace
