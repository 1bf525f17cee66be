#include "gpu_load.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <syncbn/base/gpus.h>
#include <syncbn/dist/collectives.h>

#include <vector>

#include <ATen/ops/tensor.h>

namespace syncbn::train {

GpuMeter::GpuMeter(at::Device device) : device_(device) {
  if (!device_.is_cuda()) return;
  const std::vector<base::Gpu> machine = base::machine_gpus();
  const auto visible = base::visible_gpus(machine);
  const auto index = static_cast<size_t>(device_.index());
  if (index < visible.size() && visible[index] != nullptr) uuid_ = visible[index]->uuid;
}

void GpuMeter::start_epoch() const {
  if (device_.is_cuda()) c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
}

std::optional<GpuLoad> GpuMeter::of_all_ranks() const {
  if (!device_.is_cuda()) return std::nullopt;
  const auto stats = c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const double idle = 1 - base::gpu_utilization(uuid_).value_or(0);
  at::Tensor most =
      at::tensor({static_cast<double>(stats.allocated_bytes.at(kAll).peak), idle}, at::kDouble);
  dist::all_reduce(most, c10d::ReduceOp::MAX);
  const double* const values = most.const_data_ptr<double>();
  return GpuLoad{.memory_bytes = values[0], .utilization = 1 - values[1]};
}

}  // namespace syncbn::train
