#include <syncbn/dist/ddp.h>

#include "batch_norm/convert.h"
#include "ddp/ddp_module.h"
#include "torchscript/script_module.h"

namespace syncbn::dist {
namespace {

using detail::class_of;
using detail::map_tensors;
using detail::NamedTensor;
using detail::tensor_attribute;

class ScriptModule : public detail::WrappedModule {
 public:
  explicit ScriptModule(torch::jit::Module module) : module_(std::move(module)) {}

  std::string class_name() const override { return class_of(module_); }

  std::vector<NamedTensor> parameters() const override {
    return detail::distinct(module_.named_parameters());
  }

  std::vector<NamedTensor> buffers() const override {
    return detail::distinct(module_.named_buffers());
  }

  std::unordered_set<const at::TensorImpl*> sparse_parameters() const override {
    std::unordered_set<const at::TensorImpl*> sparse;
    for (const torch::jit::Module& layer : module_.modules()) {
      const bool is_sparse = class_of(layer).starts_with("Embedding") && layer.hasattr("sparse") &&
                             layer.attr("sparse").isBool() && layer.attr("sparse").toBool();
      const at::Tensor weight = tensor_attribute(layer, "weight");
      if (is_sparse && weight.defined()) sparse.insert(weight.unsafeGetTensorImpl());
    }
    return sparse;
  }

  detail::SyncLayers sync_layers() const override {
    detail::SyncLayers found;
    for (const torch::jit::Module& layer : module_.modules()) {
      const at::Tensor mean = tensor_attribute(layer, "running_mean");
      if (const auto group = detail::converted_group(mean, tensor_attribute(layer, "weight"))) {
        found.add(*group, {mean, tensor_attribute(layer, "running_var"),
                           tensor_attribute(layer, "num_batches_tracked")});
      }
    }
    return found;
  }

 private:
  const torch::jit::Module module_;
};

}  // namespace

using Ddp = DistributedDataParallel<torch::jit::Module>;

Ddp::DistributedDataParallel(const torch::jit::Module& module, const DdpOptions& options)
    : DdpBase(std::make_shared<ScriptModule>(module), options),
      module_(std::make_unique<torch::jit::Module>(module)) {}

Ddp::~DistributedDataParallel() = default;

c10::IValue Ddp::forward(std::vector<c10::IValue> inputs) {
  before_forward();
  if (const auto device = input_device()) {
    for (c10::IValue& input : inputs) {
      input = map_tensors(input, [&](const at::Tensor& tensor) {
        return tensor.device() == *device ? tensor : tensor.to(*device, /*non_blocking=*/true);
      });
    }
  }
  const c10::IValue output = detail::run_script([&] { return (*module_)(std::move(inputs)); });
  const std::vector<at::Tensor> tensors = after_forward(detail::tensors_in(output));
  auto next = tensors.begin();
  return map_tensors(output, [&](const at::Tensor&) { return *next++; });
}

void Ddp::train(bool on) {
  module_->train(on);
}

}  // namespace syncbn::dist
