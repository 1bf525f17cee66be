#include "loader/saved_place.h"

#include <fmt/format.h>

#include <bit>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data::detail {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw base::UserError("cannot go on at the saved place in the data: " + why);
}

/// What was taken so far is the beginning of one order; nothing is the beginning of any.
void check_order(const SamplerState& state, const std::string& order) {
  if (state.consumed == 0 || state.order.empty() || state.order == order) return;
  refuse(
      fmt::format("it is in the middle of an epoch in the order '{}', this run's is '{}'; set the "
                  "sampler back, or go on from the beginning of an epoch",
                  state.order, order.empty() ? "unknown" : order));
}

}  // namespace

void check_saved_place(const SamplerState& state, const Dataset& dataset, const Sampler& sampler,
                       int64_t usable) {
  if (state.version < 1 || state.version > SamplerState::kVersion) {
    refuse(fmt::format("it was saved in format {}, this program reads formats 1 to {}",
                       state.version, SamplerState::kVersion));
  }
  if (std::bit_cast<uint64_t>(state.fingerprint) != dataset.fingerprint()) {
    refuse("the data set is not the one it was saved with");
  }
  if (state.seed != sampler.seed()) {
    refuse(
        fmt::format("it was saved with seed {}, this run has seed {}", state.seed, sampler.seed()));
  }
  check_order(state, sampler.order_name());
  const int64_t replicas = sampler.num_replicas();
  if (state.consumed < 0 || state.consumed % replicas != 0 || state.consumed / replicas > usable) {
    refuse(fmt::format("the place after {} of the epoch does not fit {} with {} each",
                       base::counted(state.consumed, "sample"), base::counted(replicas, "rank"),
                       base::counted(usable, "sample")));
  }
}

}  // namespace syncbn::data::detail
