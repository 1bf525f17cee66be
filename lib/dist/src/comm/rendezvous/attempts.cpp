#include "rendezvous/attempts.h"

#include <fmt/format.h>
#include <syncbn/base/random.h>

#include <algorithm>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace syncbn::dist::detail {
namespace {

constexpr std::chrono::milliseconds kFirstPause{1};
constexpr std::chrono::milliseconds kLongestPause{50};

constexpr char kStoreIdKey[] = "syncbn/store";
constexpr char kNewestKey[] = "syncbn/attempts";

/// The attempt that this process has left last, and the store that it was in.
struct Left {
  std::string store;
  int64_t number = 0;
};

Left& left() {
  static Left instance;
  return instance;
}

}  // namespace

Attempts::Attempts(c10::intrusive_ptr<c10d::Store> store, const Place& place)
    : store_(std::move(store)),
      id_(store_->compareSet(kStoreIdKey, std::string(), base::random_id())),
      begins_(place.rank == 0),
      is_elastic_(place.is_elastic) {}

bool Attempts::join(std::chrono::steady_clock::time_point deadline) {
  const int64_t last = left().store == id_ ? left().number : 0;
  number_ = newest();
  // Without an elastic agent, another process of rank 0 is a mistake, which arrive() finds.
  if (begins_ && (is_elastic_ || number_ == last)) {
    number_ = store_->add(kNewestKey, 1);
    return true;
  }
  number_ = std::max<int64_t>(number_, 1);  // rank 0 has yet to come, or is one of Python's
  for (auto delay = kFirstPause; number_ <= last; delay = std::min(2 * delay, kLongestPause)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(delay);
    number_ = newest();
  }
  return true;
}

c10::intrusive_ptr<c10d::Store> Attempts::store() const {
  if (number_ == 1) return store_;
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("attempt-{}", number_), store_);
}

void Attempts::leave() const {
  left() = {id_, number_};
}

int64_t Attempts::newest() const {
  return store_->add(kNewestKey, 0);
}

}  // namespace syncbn::dist::detail
