#include "batch_norm/join_statistics.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <atomic>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/exchange.h"
#include "collectives/gather_rows.h"
#include "groups/world.h"

namespace syncbn::dist::detail {
namespace {

std::atomic<JoinStatistics*> current{nullptr};

}  // namespace

JoinStatistics::JoinStatistics(ProcessGroupPtr group, at::Device device)
    : group_(std::move(group)), device_(device) {
  current = this;
}

JoinStatistics::~JoinStatistics() {
  current = nullptr;
}

void JoinStatistics::begin_step(std::function<bool()> some_joined) {
  ask_some_joined_ = std::move(some_joined);
  some_joined_.reset();
}

bool JoinStatistics::some_joined() {
  // Exchanges outside a step, such as in an evaluation, are everybody's.
  if (!ask_some_joined_) return false;
  if (!some_joined_) some_joined_ = ask_some_joined_();
  return *some_joined_;
}

JoinStatistics::Announcement JoinStatistics::exchange(const Announcement& own) {
  const at::Tensor row = at::tensor(
      {static_cast<int64_t>(own.step), own.columns, static_cast<int64_t>(own.dtype)}, at::kLong);
  const at::Tensor all = gather_rows(row.to(device_).unsqueeze(0), group_).cpu();
  Announcement heard;
  int64_t from = 0;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto* values = all[rank].const_data_ptr<int64_t>();
    const Announcement one{static_cast<Step>(values[0]), values[1],
                           static_cast<at::ScalarType>(values[2])};
    if (one.step == Step::kNoInput) continue;
    if (heard.step == Step::kNoInput) {
      heard = one;
      from = rank;
    } else if (!(heard == one)) {
      throw base::UserError(fmt::format(
          "join: ranks {} and {} are at different SyncBatchNorm layers, or only one of them ran "
          "backward after its forward; every rank with input must take the same steps",
          world_rank(group_, from), world_rank(group_, rank)));
    }
  }
  return heard;
}

void JoinStatistics::announce(const Announcement& own) {
  if (some_joined()) exchange(own);
}

void JoinStatistics::end_forward(bool backward_follows) {
  announce({Step::kForwardEnd, backward_follows ? 1 : 0});
  if (!backward_follows) ask_some_joined_ = nullptr;
}

void JoinStatistics::end_backward() {
  announce({Step::kBackwardEnd});
  ask_some_joined_ = nullptr;
}

JoinStatistics::Announcement JoinStatistics::serve() {
  for (;;) {
    const Announcement heard = exchange({});
    const auto row = [&] {
      return at::zeros({1, heard.columns}, at::TensorOptions().device(device_).dtype(heard.dtype));
    };
    switch (heard.step) {
      case Step::kGather:
        join_exchange(row(), group_);
        gather_rows(row(), group_);
        break;
      case Step::kSum:
        join_exchange(row(), group_);
        sum_rows(row(), group_);
        break;
      default:
        return heard;
    }
  }
}

bool JoinStatistics::serve_forward() {
  return serve().columns != 0;
}

void JoinStatistics::serve_backward() {
  serve();
}

void announce_gather(const at::Tensor& row, const ProcessGroupPtr& group) {
  JoinStatistics* const join = current;
  if (join == nullptr || join->group_ != group) return;
  join->announce({JoinStatistics::Step::kGather, row.size(1), row.scalar_type()});
}

void announce_sum(const at::Tensor& row, const ProcessGroupPtr& group) {
  JoinStatistics* const join = current;
  if (join == nullptr || join->group_ != group) return;
  join->announce({JoinStatistics::Step::kSum, row.size(1), row.scalar_type()});
}

}  // namespace syncbn::dist::detail
