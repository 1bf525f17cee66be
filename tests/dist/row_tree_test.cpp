// The tree that merges rows, for any number of ranks, which are threads here.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <compare>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include "transport/row_tree.h"

namespace syncbn::test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Route {
  int from, to, tag;
  auto operator<=>(const Route&) const = default;
};

/// Tensors that ranks have sent and not yet received.
class Mail {
 public:
  void put(const Route& route, const Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    sent_[route].push_back(tensor.clone());
    changed_.notify_all();
  }

  Tensor take(const Route& route, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    auto& queue = sent_[route];
    if (!changed_.wait_for(lock, timeout, [&] { return !queue.empty(); })) {
      throw std::runtime_error("timed out");
    }
    Tensor tensor = queue.front();
    queue.pop_front();
    return tensor;
  }

  bool is_empty() const {
    return std::all_of(sent_.begin(), sent_.end(),
                       [](const auto& one) { return one.second.empty(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Route, std::deque<Tensor>> sent_;
};

class LocalRank : public c10d::Backend {
 public:
  LocalRank(Mail& mail, int rank, int size) : c10d::Backend(rank, size), mail_(mail) {}

  int sent = 0;
  int received = 0;

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    ++sent;
    mail_.put({getRank(), to, tag}, tensors[0]);
    return c10::make_intrusive<Transfer>([] {});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    ++received;
    return c10::make_intrusive<Transfer>([this, from, tag, tensor = tensors[0]] {
      tensor.copy_(mail_.take({from, getRank(), tag}, std::chrono::seconds(30)));
    });
  }

 private:
  class Transfer : public c10d::Work {
   public:
    explicit Transfer(std::function<void()> complete) : complete_(std::move(complete)) {}
    bool wait(std::chrono::milliseconds /*timeout*/) override {
      complete_();
      return true;
    }

   private:
    const std::function<void()> complete_;
  };

  Mail& mail_;
};

/// A row (a, b) stands for the function a x + b; rows merge to the composition, which is
/// associative, but not commutative. The results are exact, since the numbers are small.
Tensor compose(const Tensor& rows) {
  double a = 1;
  double b = 0;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const auto* row = rows[i].const_data_ptr<double>();
    a *= row[0];
    b = b * row[0] + row[1];
  }
  return at::tensor({a, b}, at::kDouble).unsqueeze(0);
}

Tensor row_of(int rank) {
  return at::tensor({rank % 4 == 0 ? 2.0 : -1.0, rank + 1.0}, at::kDouble).unsqueeze(0);
}

TEST(RowTreeTest, RowsAreMergedInTheOrderOfRanksInLogarithmicallyManyHops) {
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 11, 17, 24, 33, 63, 128}) {
    SCOPED_TRACE(ranks);
    Mail mail;
    std::vector<std::unique_ptr<LocalRank>> all;
    Tensors rows;
    for (int rank = 0; rank < ranks; ++rank) {
      all.push_back(std::make_unique<LocalRank>(mail, rank, ranks));
      rows.push_back(row_of(rank));
    }
    Tensors merged(all.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      threads.emplace_back([&, rank] {
        dist::detail::RowTree tree(*all[rank], 7, compose, std::chrono::seconds(30));
        merged[rank] = tree.merged(rows[rank]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const int hops = std::bit_width(static_cast<unsigned>(ranks) - 1);  // log2, rounded up
    for (size_t rank = 0; rank < all.size(); ++rank) {
      EXPECT_TRUE(merged[rank].equal(compose(at::cat(rows)))) << "rank " << rank;
      EXPECT_LE(all[rank]->received, hops);
      EXPECT_LE(all[rank]->sent, 2 * hops);
    }
    EXPECT_TRUE(mail.is_empty());
  }
}

}  // namespace
}  // namespace syncbn::test
