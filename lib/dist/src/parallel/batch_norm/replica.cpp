#include "batch_norm/replica.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace syncbn::dist::detail {

// The gradient of a replica's parameter goes through a ReduceAdd node to the original's
// AccumulateGrad. It is recognised by its name because the header of its class is a large one.
bool is_replica(const at::Tensor& parameter) {
  return parameter.defined() && parameter.grad_fn() && parameter.grad_fn()->num_outputs() == 1 &&
         parameter.grad_fn()->name().find("ReduceAdd") != std::string::npos;
}

at::Tensor original_of(const at::Tensor& parameter) {
  if (!is_replica(parameter)) return {};
  const auto& node = parameter.grad_fn();
  const auto* original =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(node->next_edge(0).function.get());
  return original != nullptr ? original->variable : at::Tensor();
}

void throw_is_replica(const LayerName& layer) {
  throw base::UserError(fmt::format(
      "SyncBatchNorm: {} runs as a replica of torch::nn::parallel::data_parallel, whose "
      "threads are no ranks and would exchange over one process group at once; use "
      "DistributedDataParallel with one process per device",
      layer.given.empty() ? "a layer" : fmt::format("layer '{}'", layer.given)));
}

}  // namespace syncbn::dist::detail
