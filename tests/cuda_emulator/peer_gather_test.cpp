// The kernel that gathers rows through the memory of GPUs: each rank is a thread that emulates it.

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

#include "cuda_emulator/peer_gather_kernel.h"

namespace syncbn::dist::detail::cuda {
namespace {

using Numbers = std::vector<double>;

class PeerGatherTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  /// What a rank has after a gather of `row`.
  Numbers gather(int rank, const Numbers& row, uint64_t tag, uint64_t seed = 0) {
    Numbers rows(kRanks * row.size(), -7);
    PeerGatherArguments arguments{.rank = rank,
                                  .ranks = kRanks,
                                  .tag = tag,
                                  .row = row.data(),
                                  .count = static_cast<int64_t>(row.size()),
                                  .rows = rows.data(),
                                  .aborted = &aborted_};
    for (size_t i = 0; i < kRanks; ++i) arguments.mailboxes[i] = mailboxes_[i].get();
    emulate(arguments, seed);
    return rows;
  }

  void abort() { std::atomic_ref(aborted_).store(1); }

  unsigned aborted_ = 0;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_ = [] {
    std::vector<std::unique_ptr<Mailbox>> made;
    for (int i = 0; i < kRanks; ++i) made.push_back(std::make_unique<Mailbox>());
    return made;
  }();
};

/// The row of a rank in an exchange.
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
