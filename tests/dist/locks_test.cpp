// Destroying the last reference to a tensor of Python waits for the GIL, and a thread that holds
// the GIL may wait for a mutex of this library. So nothing that may own a tensor is destroyed, and
// no callback runs, under one.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/ones.h>

#include "batch_norm/convert.h"
#include "batch_norm/replica_team.h"
#include "monitor/completion_queries.h"
#include "monitor/flight_recorder.h"
#include "transport/exchange.h"

namespace syncbn::test {
namespace {

namespace detail = dist::detail;
namespace shm = dist::detail::shm;
using detail::FlightRecorder;

constexpr std::chrono::seconds kLong(20);

/// Expects that another thread gets the lock that `use` needs.
void expect_free(std::function<void()> use) {
  std::packaged_task<void()> task(std::move(use));
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  EXPECT_EQ(done.wait_for(kLong), std::future_status::ready)
      << "destroyed or called under the lock";
}

/// Stands for a tensor of Python.
class Owner {
 public:
  /// @param use takes the lock under which this object must not be destroyed
  explicit Owner(std::function<void()> use) : use_(std::move(use)) {}
  ~Owner() {
    expect_free(std::move(use_));
    destroyed_.set_value();
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  std::future<void> destroyed() { return destroyed_.get_future(); }

 private:
  std::function<void()> use_;
  std::promise<void> destroyed_;
};

class OwningOperation : public shm::Operation {
 public:
  OwningOperation(std::shared_ptr<Owner> owner, int64_t steps, std::shared_future<void> go)
      : Operation({}), owner_(std::move(owner)), steps_(steps), go_(std::move(go)) {}

  int64_t steps() const override { return steps_; }
  void publish(const shm::Step& /*step*/) override {}
  void consume(const shm::Step& /*step*/) override { go_.wait(); }

 private:
  const std::shared_ptr<Owner> owner_;
  const int64_t steps_;
  const std::shared_future<void> go_;
};

class ExchangeLockTest : public ::testing::Test {
 protected:
  ExchangeLockTest() {
    const shm::Layout layout(1);
    std::vector<shm::Segment> segments;
    segments.push_back(shm::Segment::make(layout).value());
    exchange_ =
        std::make_shared<shm::Exchange>(layout, std::move(segments), 0, std::vector<int>{0});
  }

  /// Starts an operation that waits for `go_`, and keeps no reference to it.
  /// @return when it has been destroyed
  std::future<void> start_and_drop(int64_t steps, bool with_future) {
    auto owner = std::make_shared<Owner>([exchange = exchange_] { exchange->is_idle(); });
    std::future<void> destroyed = owner->destroyed();
    const auto work = exchange_->start(
        c10d::OpType::BARRIER, ++tag_,
        std::make_unique<OwningOperation>(std::move(owner), steps, go_.get_future().share()),
        kTimeout);
    if (with_future) work->getFuture()->addCallback([](auto&) {});
    return destroyed;
  }

  static constexpr std::chrono::milliseconds kTimeout{60'000};
  std::shared_ptr<shm::Exchange> exchange_;
  std::promise<void> go_;
  uint64_t tag_ = 0;
};

TEST_F(ExchangeLockTest, TheBackgroundThreadDropsAnOperation) {
  const auto destroyed = start_and_drop(/*steps=*/2, /*with_future=*/false);
  go_.set_value();
  EXPECT_EQ(destroyed.wait_for(kLong), std::future_status::ready);
}

TEST_F(ExchangeLockTest, TheBackgroundThreadDropsAnOperationWithAFuture) {
  const auto destroyed = start_and_drop(/*steps=*/2, /*with_future=*/true);
  go_.set_value();
  EXPECT_EQ(destroyed.wait_for(kLong), std::future_status::ready);
}

TEST_F(ExchangeLockTest, AThreadThatWaitsForALaterOperationDropsOne) {
  go_.set_value();
  const auto destroyed = start_and_drop(/*steps=*/1, /*with_future=*/false);
  std::promise<void> now;
  now.set_value();
  const auto later = exchange_->begin(
      ++tag_, std::make_unique<OwningOperation>(nullptr, 1, now.get_future().share()), kTimeout);
  exchange_->wait(later, std::chrono::milliseconds(-1));
  EXPECT_EQ(destroyed.wait_for(kLong), std::future_status::ready);
}

TEST_F(ExchangeLockTest, StoppingDropsOperations) {
  go_.set_value();
  const auto destroyed = start_and_drop(/*steps=*/1, /*with_future=*/false);
  exchange_->stop();
  EXPECT_EQ(destroyed.wait_for(kLong), std::future_status::ready);
}

TEST(FlightRecorderLockTest, TheCompletionOfACallIsDropped) {
  FlightRecorder log("group", {0, 1}, [](auto) {});
  std::vector<std::future<void>> destroyed;
  const auto begin = [&](uint64_t sequence, int peer = -1) {
    detail::Call call;
    call.type = peer < 0 ? c10d::OpType::ALLREDUCE : c10d::OpType::SEND;
    call.sequence = sequence;
    call.peer = peer;
    log.begin(call);
    const auto owner = std::make_shared<Owner>([&log] { static_cast<void>(log.failed()); });
    destroyed.push_back(owner->destroyed());
    log.set_completion(call, [owner] { return false; });
    return call;
  };
  log.succeed(begin(1));
  log.fail(begin(2));
  log.succeed(begin(1, /*peer=*/1));
  begin(3);
  detail::Call in_its_place;
  in_its_place.sequence = 3 + FlightRecorder::kKept;
  log.begin(in_its_place);  // returns the completion of call 3
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(destroyed[i].wait_for(kLong), std::future_status::ready) << i;
  }
}

TEST(CompletionQueriesLockTest, TheLastReferenceToALogIsDropped) {
  const auto queries = std::make_shared<std::unique_ptr<detail::CompletionQueries>>(
      std::make_unique<detail::CompletionQueries>());
  auto owner = std::make_shared<Owner>([queries] { queries->reset(); });
  std::future<void> destroyed = owner->destroyed();
  std::promise<void> dropped_here;
  auto log = std::make_shared<FlightRecorder>("group", std::vector<int>{0, 1},
                                              [owner = std::move(owner)](auto) {});
  detail::Call call;
  call.sequence = 1;
  log->begin(call);
  log->set_completion(call, [go = dropped_here.get_future().share()] {
    go.wait();
    return true;
  });
  detail::CompletionQueries::Logs logs{std::move(log)};
  (*queries)->update(std::move(logs), std::chrono::milliseconds(1));
  dropped_here.set_value();
  EXPECT_EQ(destroyed.wait_for(kLong), std::future_status::ready);
}

TEST(ReplicaTeamLockTest, TheReplicasWorkRuns) {
  detail::ReplicaTeam team(1, kLong);
  const int layer = 0;
  team.meet(0, {&layer, "a layer", nullptr},
            [&](std::span<void* const>) { expect_free([&] { team.fail(); }); });
}

TEST(ConvertedLayersLockTest, LayersOfDestroyedTensorsAreDropped) {
  auto owner = std::make_shared<Owner>([] { detail::registered_keys(); });
  std::future<void> destroyed = owner->destroyed();
  detail::ConvertedLayer layer;
  layer.release = [owner = std::move(owner)] {};
  detail::register_layer(at::ones({3}), {}, std::move(layer));
  detail::registered_keys();
  EXPECT_EQ(destroyed.wait_for(kLong), std::future_status::ready);
}

}  // namespace
}  // namespace syncbn::test
