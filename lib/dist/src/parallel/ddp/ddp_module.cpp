#include "ddp/ddp_module.h"

#include <syncbn/base/error.h>

#include <algorithm>

#include <torch/nn/modules/embedding.h>

#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"

namespace syncbn::dist::detail {
namespace {

class EagerModule : public WrappedModule {
 public:
  explicit EagerModule(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    name_layers(*module_);
  }

  std::string class_name() const override { return module_->name(); }

  std::vector<NamedTensor> parameters() const override {
    return distinct(module_->named_parameters());
  }

  std::vector<NamedTensor> buffers() const override { return distinct(module_->named_buffers()); }

  std::unordered_set<const at::TensorImpl*> sparse_parameters() const override {
    std::unordered_set<const at::TensorImpl*> sparse;
    const auto add = [&sparse](const auto* layer) {
      if (layer != nullptr && layer->options.sparse()) {
        sparse.insert(layer->weight.unsafeGetTensorImpl());
      }
    };
    for (const auto& layer : module_->modules()) {
      add(layer->as<torch::nn::EmbeddingImpl>());
      add(layer->as<torch::nn::EmbeddingBagImpl>());
    }
    return sparse;
  }

  SyncLayers sync_layers() const override {
    SyncLayers found;
    for (const auto& layer : module_->modules()) {
      if (const auto* own = layer->as<SyncBatchNormImpl>()) {
        const auto& options = own->options;
        found.add(options.group_size() > 0 ? statistics_group_of(options)
                                           : ProcessGroupPtr(options.process_group()),
                  {own->running_mean, own->running_var, own->num_batches_tracked});
      }
      const NormTensors one = norm_tensors(*layer);
      if (const auto group = converted_group(one.running_mean, one.weight)) {
        found.add(*group, {one.running_mean, one.running_var, one.num_batches_tracked});
      }
    }
    return found;
  }

 private:
  const std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace

void SyncLayers::add(const ProcessGroupPtr& group,
                     const std::vector<at::Tensor>& statistics_of_layer) {
  if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  for (const at::Tensor& tensor : statistics_of_layer) {
    if (tensor.defined()) statistics.push_back(tensor);
  }
}

std::shared_ptr<WrappedModule> wrap(std::shared_ptr<torch::nn::Module> module) {
  if (!module) throw base::UserError("DistributedDataParallel: the module is null");
  return std::make_shared<EagerModule>(std::move(module));
}

}  // namespace syncbn::dist::detail
