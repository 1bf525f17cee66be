#include "rendezvous/attempts.h"

#include <fmt/format.h>
#include <syncbn/base/random.h>

#include <algorithm>
#include <map>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "rendezvous/polls.h"

namespace syncbn::dist::detail {
namespace {

/// Rank 0 sets it when it begins the attempt.
std::string key_of(int64_t number) {
  return fmt::format("syncbn/attempt/{}", number);
}

/// By store, the attempt that this process has left last.
std::map<std::string, int64_t>& left() {
  static std::map<std::string, int64_t> instance;
  return instance;
}

}  // namespace

Attempts::Attempts(c10::intrusive_ptr<c10d::Store> store, const Place& place)
    : store_(std::move(store)),
      id_(store_->compareSet("syncbn/store", std::string(), base::random_id())),
      begins_(place.rank == 0),
      is_elastic_(place.is_elastic) {}

bool Attempts::join(std::chrono::steady_clock::time_point deadline) {
  const int64_t last = left()[id_];
  number_ = std::max(number_, last);
  while (is_over()) ++number_;
  // Without an elastic agent, another process of rank 0 is a mistake, which arrive() finds.
  if (begins_ && (is_elastic_ || number_ == last)) {
    // Of two processes that begin at once, one begins the attempt and the other finds it begun.
    store_->compareSet(key_of(++number_), std::string(), std::string("begun"));
    return true;
  }
  if (last == 0) number_ = std::max<int64_t>(number_, 1);  // rank 0 may come later, or be Python's
  for (Polls polls; number_ == last; polls.pause()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    if (is_over()) ++number_;
  }
  return true;
}

c10::intrusive_ptr<c10d::Store> Attempts::store() const {
  if (number_ == 1) return store_;
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("attempt-{}", number_), store_);
}

bool Attempts::is_over() const {
  return store_->check({key_of(number_ + 1)});
}

void Attempts::leave() const {
  left()[id_] = number_;
}

}  // namespace syncbn::dist::detail
