#include "records/worst_samples.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace syncbn::train {

Task::Seen some_of(const data::Batch& batch, const Task::Outputs& outputs, int64_t first,
                   int64_t count) {
  if (count >= batch.size()) return {.batch = batch, .outputs = outputs};
  const auto some = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, first, count).clone();
  };
  Task::Seen seen{.batch = {.data = some(batch.data), .target = some(batch.target)}, .outputs = {}};
  if (batch.sizes.defined()) seen.batch.sizes = some(batch.sizes);
  for (const at::Tensor& output : outputs) seen.outputs.push_back(some(output));
  return seen;
}

void WorstSamples::add(const data::Batch& batch, const Task::Outputs& outputs,
                       const at::Tensor& loss_sum) {
  if (count_ == 0) return;
  std::vector<at::Tensor> sums;
  for (int64_t i = 0; i < batch.size() && batch.size() > 1; ++i) {
    Task::Outputs own;
    for (const at::Tensor& output : outputs) own.push_back(output.narrow(0, i, 1));
    sums.push_back(task_.loss_sum(own, batch.target.narrow(0, i, 1)));
  }
  if (sums.empty()) sums = {loss_sum};
  const at::Tensor all = at::stack(sums).to(at::kCPU, at::kDouble);  // one wait for the device
  for (int64_t i = 0; i < batch.size(); ++i) {
    const double loss = all[i][0].item<double>() / std::max(all[i][1].item<double>(), 1.0);
    const bool is_full = std::ssize(worst_) == count_;
    if (std::isnan(loss)) continue;  // from a diverged network; NaN has no order
    if (is_full && loss <= std::prev(worst_.end())->first) continue;
    worst_.emplace(loss, some_of(batch, outputs, i, 1));
    if (is_full) worst_.erase(std::prev(worst_.end()));
  }
}

std::vector<Task::Seen> WorstSamples::take() {
  std::vector<Task::Seen> all;
  for (auto& [loss, sample] : worst_) all.push_back(std::move(sample));
  worst_.clear();
  return all;
}

}  // namespace syncbn::train
