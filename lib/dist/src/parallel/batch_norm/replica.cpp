#include "batch_norm/replica.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <c10/util/ParallelGuard.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace syncbn::dist::detail {

// data_parallel gives the parameters of its replicas a node, ReduceAdd, that hands their gradients
// to the original's AccumulateGrad. Its class is in a header that includes a great deal; its name
// will do.
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

void refuse_replicas(const at::Tensor& weight, const LayerName& layer) {
  // data_parallel runs its replicas inside at::parallel_for. That is all there is to tell a layer
  // without a weight by, and wrong for any other layer, too.
  if (c10::ParallelGuard::is_enabled() || is_replica(weight)) throw_is_replica(layer);
}

void throw_is_replica(const LayerName& layer) {
  throw base::UserError(fmt::format(
      "SyncBatchNorm: {} runs as a replica of torch::nn::parallel::data_parallel, whose "
      "threads are no ranks and would exchange over one process group at once; use "
      "DistributedDataParallel with one process per device",
      layer.given.empty() ? "a layer" : fmt::format("layer '{}'", layer.given)));
}

}  // namespace syncbn::dist::detail
