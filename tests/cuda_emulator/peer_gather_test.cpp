// The kernels that gather rows through the memory of GPUs. Each rank is a thread that emulates
// them.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cuda_emulator/batch_norm_kernels.h"
#include "cuda_emulator/peer_gather_kernel.h"

namespace syncbn::dist::detail::cuda {
namespace {

using Numbers = std::vector<double>;

class PeerGatherTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  /// The rows that a rank has after a gather of `row`.
  Numbers gather(int rank, const Numbers& row, uint64_t tag, uint64_t seed = 0) {
    Numbers rows(kRanks * row.size(), -7);
    emulate(arguments_of(rank, row, tag, rows), seed);
    return rows;
  }

  PeerGatherArguments arguments_of(int rank, const Numbers& row, uint64_t tag, Numbers& rows) {
    PeerGatherArguments arguments{.rank = rank,
                                  .ranks = kRanks,
                                  .tag = tag,
                                  .row = row.data(),
                                  .count = static_cast<int64_t>(row.size()),
                                  .rows = rows.data(),
                                  .aborted = &aborted_};
    for (size_t i = 0; i < kRanks; ++i) arguments.mailboxes[i] = mailboxes_[i].get();
    return arguments;
  }

  void abort() { std::atomic_ref(aborted_).store(1); }

  unsigned aborted_ = 0;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_ = [] {
    std::vector<std::unique_ptr<Mailbox>> made;
    for (int i = 0; i < kRanks; ++i) made.push_back(std::make_unique<Mailbox>());
    return made;
  }();
};

/// A rank's row in the given exchange.
Numbers row_of(int rank, uint64_t exchange) {
  Numbers row(1 + exchange * 37 % 900);
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<double>(rank) + 10.0 * static_cast<double>(exchange) + 1e-3 * double(i);
  }
  return row;
}

TEST_F(PeerGatherTest, AllRanksHaveTheRowsOfEachExchange) {
  constexpr uint64_t kExchanges = 40;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([this, rank] {
      std::mt19937_64 random(static_cast<uint64_t>(rank));
      for (uint64_t exchange = 1; exchange <= kExchanges; ++exchange) {
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        Numbers expected;
        for (int peer = 0; peer < kRanks; ++peer) {
          const Numbers row = row_of(peer, exchange);
          expected.insert(expected.end(), row.begin(), row.end());
        }
        ASSERT_EQ(gather(rank, row_of(rank, exchange), exchange, random()), expected);
      }
    });
  }
}

TEST_F(PeerGatherTest, AnAbortEndsTheWaitForARankThatDoesNotCome) {
  std::atomic<int> ended = 0;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank + 1 < kRanks; ++rank) {
    threads.emplace_back([this, rank, &ended] {
      const Numbers rows = gather(rank, {1, 2}, 1);
      EXPECT_EQ(std::count(rows.begin(), rows.end(), -7), std::ssize(rows)) << "nothing is written";
      ++ended;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(ended, 0);
  abort();
}

/// A rank's part of a layer: the input of its kernels and the rows that they write.
class RankOfLayer {
 public:
  RankOfLayer(int rank, const Layout& layout) : layout_(layout) {
    std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
    std::normal_distribution<float> normal(static_cast<float>(rank));
    x_.resize(static_cast<size_t>(layout.n * layout.c * layout.s));
    for (float& value : x_) value = normal(random);
    EXPECT_GT(layout.tiles(), 1);
    EXPECT_GT(shape().slices, 1);
  }

  /// @param peers null: gather nothing
  Numbers moments(const PeerGatherArguments* peers, uint64_t seed) {
    MomentsArguments arguments{.shape = shape(), .input = x_.data()};
    std::vector<Moments> partials(workspace());
    arguments.partials = partials.data();
    return run(arguments, 2 * layout_.c + 1, &MomentsArguments::row, peers, seed);
  }
  Numbers sums(const PeerGatherArguments* peers, uint64_t seed) {
    const Numbers moments(static_cast<size_t>(2 * layout_.c + 1), 0.5);
    ReduceArguments arguments{.shape = shape(),
                              .gradient = x_.data(),
                              .input = x_.data(),
                              .moments = moments.data(),
                              .invstd = moments.data()};
    std::vector<ChannelSums> partials(workspace());
    arguments.partials = partials.data();
    return run(arguments, 2 * layout_.c, &ReduceArguments::sums, peers, seed);
  }

 private:
  LaunchShape shape() {
    return {layout_, layout_.columns(), layout_.slices(/*blocks=*/6), tickets_.data()};
  }
  size_t workspace() { return static_cast<size_t>(shape().slices * layout_.c); }

  template <class Arguments>
  Numbers run(Arguments& arguments, int64_t size, double* Arguments::*row,
              const PeerGatherArguments* peers, uint64_t seed) {
    Numbers own(static_cast<size_t>(size), -7);
    arguments.*row = own.data();
    if (peers != nullptr) {
      arguments.peers = *peers;
      arguments.peers.row = own.data();
      arguments.peers.count = size;
    }
    emulate(arguments, ValueType::kFloat, {.seed = seed});
    EXPECT_EQ(std::count(tickets_.begin(), tickets_.end(), 0U), std::ssize(tickets_));
    return own;
  }

  const Layout layout_;
  std::vector<float> x_;
  std::vector<unsigned> tickets_ = std::vector<unsigned>(7);
};

// Rows in two tiles, and planes of three channels; each has at least two blocks.
constexpr Layout kLayouts[] = {{.rows = true, .n = 1100, .c = 70},
                               {.rows = false, .n = 2, .c = 3, .s = 20000}};

TEST_F(PeerGatherTest, KernelsThatComputeRowsGatherThem) {
  uint64_t exchanges = 0;
  for (const Layout& layout : kLayouts) {
    for (const auto kernel : {&RankOfLayer::moments, &RankOfLayer::sums}) {
      Numbers expected;
      for (int rank = 0; rank < kRanks; ++rank) {
        const Numbers row = (RankOfLayer(rank, layout).*kernel)(nullptr, 0);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      ++exchanges;
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < kRanks; ++rank) {
        threads.emplace_back([&, rank] {
          RankOfLayer own(rank, layout);
          Numbers rows(expected.size(), -7);
          // A rank that joins the exchange without running the layer gathers with the other kernel.
          if (rank == 1) {
            const Numbers row = (own.*kernel)(nullptr, 5);
            rows = gather(rank, row, exchanges, 7);
          } else {
            const PeerGatherArguments peers = arguments_of(rank, {}, exchanges, rows);
            (own.*kernel)(&peers, static_cast<uint64_t>(rank));
          }
          EXPECT_EQ(rows, expected);
        });
      }
    }
  }
}

TEST_F(PeerGatherTest, AnAbortEndsAKernelThatGathersItsRow) {
  for (const Layout& layout : kLayouts) {
    std::atomic<bool> has_ended = false;
    std::jthread thread([&] {
      RankOfLayer own(0, layout);
      Numbers rows(static_cast<size_t>(kRanks * (2 * layout.c + 1)), -7);
      const PeerGatherArguments peers = arguments_of(0, {}, 1, rows);
      const Numbers row = own.moments(&peers, 1);
      EXPECT_EQ(std::count(rows.begin(), rows.end(), -7), std::ssize(rows)) << "nothing is written";
      EXPECT_EQ(row, RankOfLayer(0, layout).moments(nullptr, 2));
      has_ended = true;
    });
    if (aborted_ == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      EXPECT_FALSE(has_ended);
      abort();
    }
  }
}

TEST_F(PeerGatherTest, RanksInDifferentCallsWaitForEachOther) {
  std::atomic<int> ended = 0;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([this, rank, &ended] {
      gather(rank, {1, 2}, rank == 1 ? 100 : 99);
      ++ended;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(ended, 0);
  abort();
}

}  // namespace
}  // namespace syncbn::dist::detail::cuda
