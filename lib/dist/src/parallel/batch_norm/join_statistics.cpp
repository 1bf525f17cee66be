#include "batch_norm/join_statistics.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/exchange.h"
#include "collectives/gather_rows.h"
#include "groups/world.h"

namespace syncbn::dist::detail {
namespace {

std::atomic<JoinStatistics*> current{nullptr};

}  // namespace

JoinStatistics::JoinStatistics(ProcessGroupPtr group, std::vector<at::Device> devices)
    : group_(std::move(group)), devices_(std::move(devices)) {
  current = this;
}

JoinStatistics::~JoinStatistics() {
  current = nullptr;
}

void JoinStatistics::begin_step(std::function<bool()> some_joined) {
  ask_some_joined_ = std::move(some_joined);
  some_joined_.reset();
}

JoinStatistics::Announcement JoinStatistics::exchange(const Announcement& own) {
  const at::Tensor row = at::tensor(
      {static_cast<int64_t>(own.step), own.columns, static_cast<int64_t>(own.dtype), own.device},
      at::kLong);
  const at::Tensor all = gather_rows(row.to(devices_.front()).unsqueeze(0), group_).cpu();
  Announcement announced;
  int64_t from = 0;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto* values = all[rank].const_data_ptr<int64_t>();
    const Announcement one{static_cast<JoinStep>(values[0]), values[1],
                           static_cast<at::ScalarType>(values[2]), values[3]};
    if (one.step == JoinStep::kNoInput) continue;
    if (announced.step == JoinStep::kNoInput) {
      announced = one;
      from = rank;
    } else if (!(announced == one)) {
      throw base::UserError(fmt::format(
          "join: ranks {} and {} are at different SyncBatchNorm layers, or only one of them ran "
          "backward after its forward; every rank with input must take the same steps",
          world_rank(group_, from), world_rank(group_, rank)));
    }
  }
  return announced;
}

void JoinStatistics::announce(const Announcement& own) {
  // Outside a step, such as in an evaluation, all ranks run the layers.
  if (!ask_some_joined_) return;
  if (!some_joined_) some_joined_ = ask_some_joined_();
  if (*some_joined_) exchange(own);
}

void JoinStatistics::end_forward(bool backward_follows) {
  announce({JoinStep::kForwardEnd, backward_follows ? 1 : 0});
  if (!backward_follows) ask_some_joined_ = nullptr;
}

void JoinStatistics::end_backward() {
  announce({JoinStep::kBackwardEnd});
  ask_some_joined_ = nullptr;
}

bool JoinStatistics::serve() {
  for (;;) {
    const Announcement next = exchange({});
    if (next.step != JoinStep::kMoments && next.step != JoinStep::kSums) return next.columns != 0;
    const at::Device device = devices_.at(static_cast<size_t>(next.device));
    join_exchange(
        next.step,
        at::zeros({1, next.columns}, at::TensorOptions().device(device).dtype(next.dtype)), group_);
  }
}

void announce_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group) {
  JoinStatistics* const join = current;
  if (join == nullptr || join->group_ != group) return;
  const auto place = std::ranges::find(join->devices_, row.device());
  join->announce(
      {step, row.size(1), row.scalar_type(), std::distance(join->devices_.begin(), place)});
}

}  // namespace syncbn::dist::detail
