#include "records/gpu_load.h"

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
  constexpr double kUnknown = 2;  // above any idle share, so it is the maximum
  const auto utilization = base::gpu_utilization(uuid_);
  at::Tensor most = at::tensor({static_cast<double>(stats.allocated_bytes.at(kAll).peak),
                                utilization ? 1 - *utilization : kUnknown},
                               at::kDouble);
  dist::all_reduce(most, c10d::ReduceOp::MAX);
  const double* const values = most.const_data_ptr<double>();
  GpuLoad load{.memory_bytes = values[0]};
  if (values[1] != kUnknown) load.utilization = 1 - values[1];
  return load;
}

}  // namespace syncbn::train
