// How the threads of replicas synchronise. Without libtorch, so that ThreadSanitizer can run it.

#include "batch_norm/replica_team.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device_threads/device_threads.h"

namespace syncbn::dist::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kReplicas = 4;
constexpr std::chrono::seconds kLong{60};

/// Calls work(replica, team) on a thread for each replica. @return each replica's error
template <class Work>
std::vector<std::string> run(DeviceThreads& threads, int replicas,
                             std::chrono::milliseconds timeout, const Work& work) {
  ReplicaTeam team(replicas, timeout);
  std::vector<std::string> errors(static_cast<size_t>(replicas));
  threads.run(replicas, [&](int replica) {
    auto& error = errors[static_cast<size_t>(replica)];
    try {
      work(replica, team);
      team.leave(replica);
    } catch (const ReplicaTeam::Abandoned&) {
      error = "abandoned";
    } catch (const std::exception& thrown) {
      error = thrown.what();
      team.fail();
    }
  });
  return errors;
}

TEST(ReplicaTeamTest, TheLastToComeWorksForAll) {
  std::atomic<int> prepared{0};
  DeviceThreads threads("test", kReplicas, [&] { ++prepared; });
  EXPECT_EQ(prepared, kReplicas);
  const int layer = 0;
  for (int round = 0; round < 200; ++round) {
    const int replicas = 2 + round % (kReplicas - 1);
    const auto errors = run(threads, replicas, kLong, [&](int replica, ReplicaTeam& team) {
      for (int call = 0; call < 5; ++call) {
        int own = replica + call;
        team.meet(replica, {&layer, "a layer", &own}, [&](std::span<void* const> parts) {
          int sum = 0;
          for (void* part : parts) sum += *static_cast<int*>(part);
          for (void* part : parts) *static_cast<int*>(part) = sum;
        });
        ASSERT_EQ(own, replicas * (replicas - 1) / 2 + replicas * call);
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

TEST(ReplicaTeamTest, OneErrorEndsAll) {
  DeviceThreads threads("test", kReplicas, [] {});
  const int layer = 0;
  for (int round = 0; round < 100; ++round) {
    const int bad = round % kReplicas;
    const auto errors = run(threads, kReplicas, kLong, [&](int replica, ReplicaTeam& team) {
      if (replica == bad) throw base::UserError("no");
      team.meet(replica, {&layer, "a layer", nullptr}, [](std::span<void* const>) {});
    });
    for (int i = 0; i < kReplicas; ++i) {
      EXPECT_EQ(errors[static_cast<size_t>(i)], i == bad ? "no" : "abandoned");
    }
    const auto in_work = run(threads, kReplicas, kLong, [&](int replica, ReplicaTeam& team) {
      team.meet(replica, {&layer, "a layer", nullptr},
                [](std::span<void* const>) { throw base::UserError("work"); });
    });
    EXPECT_EQ(std::ranges::count(in_work, "work"), 1);
    EXPECT_EQ(std::ranges::count(in_work, "abandoned"), kReplicas - 1);
  }
}

TEST(ReplicaTeamTest, OtherLayersEarlyEndsAndTimeoutsAreNamedOnce) {
  DeviceThreads threads("test", 2, [] {});
  const int layers[2] = {};
  const auto meet = [&](int replica, ReplicaTeam& team, int layer) {
    team.meet(replica, {&layers[layer], "layer " + std::to_string(layer), nullptr},
              [](std::span<void* const>) {});
  };
  const auto the_error = [&](std::chrono::milliseconds timeout, const auto& work) {
    const auto errors = run(threads, 2, timeout, work);
    std::string error;
    for (const std::string& one : errors) {
      if (one.empty() || one == "abandoned") continue;
      EXPECT_EQ(error, "");
      error = one;
    }
    return error;
  };
  EXPECT_THAT(
      the_error(kLong, [&](int replica, ReplicaTeam& team) { meet(replica, team, replica); }),
      HasSubstr("replica 0 is in layer 0, replica 1 is in layer 1"));
  EXPECT_THAT(the_error(kLong,
                        [&](int replica, ReplicaTeam& team) {
                          if (replica == 1) meet(replica, team, 1);
                        }),
              HasSubstr("replica 0 has returned, replica 1 is in layer 1"));
  EXPECT_THAT(the_error(std::chrono::milliseconds(500),
                        [&](int replica, ReplicaTeam& team) {
                          if (replica == 0) {  // for longer than the timeout
                            std::this_thread::sleep_for(std::chrono::seconds(2));
                          }
                          meet(replica, team, 0);
                        }),
              HasSubstr("replica 0 did not arrive at layer 0 within 0.5 s"));
}

TEST(ReplicaTeamTest, TheSmallerTimeoutHolds) {
  DeviceThreads threads("test", 2, [] {});
  const int layer = 0;
  const auto error = [&](std::chrono::milliseconds of_team, std::chrono::milliseconds of_layer) {
    const auto errors = run(threads, 2, of_team, [&](int replica, ReplicaTeam& team) {
      if (replica == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
      team.meet(replica, {&layer, "a layer", nullptr, of_layer}, [](std::span<void* const>) {});
    });
    return errors[0];
  };
  using namespace std::chrono_literals;
  EXPECT_THAT(error(kLong, 200ms), HasSubstr("replica 1 did not arrive at a layer within 0.2 s"));
  EXPECT_THAT(error(200ms, kLong), HasSubstr("within 0.2 s"));
  EXPECT_EQ(error(kLong, kLong), "");
}

}  // namespace
}  // namespace syncbn::dist::detail
