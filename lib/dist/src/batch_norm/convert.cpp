#include "batch_norm/convert.h"

#include <syncbn/base/error.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <functional>
#include <mutex>
#include <unordered_map>

#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>

#include "batch_norm/batch_norm_function.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace detail {
namespace {

struct Layer {
  // Weak, so that a destroyed layer leaves its memory but not its address free: another tensor can
  // never be mistaken for it.
  c10::weak_intrusive_ptr<at::TensorImpl> key;
  ProcessGroupPtr group;
  std::function<bool()> is_training;
};

struct Layers {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Layer> by_key;
};

Layers& layers() {
  static auto* const instance = new Layers();  // backward threads may outlive static destructors
  return *instance;
}

std::optional<Layer> find(const at::Tensor& key) {
  if (!key.defined()) return std::nullopt;
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  const auto layer = all.by_key.find(key.unsafeGetTensorImpl());
  if (layer == all.by_key.end() || layer->second.key.expired()) return std::nullopt;
  return layer->second;
}

at::Tensor value_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace

at::Tensor layer_key(const at::Tensor& running_mean, const at::Tensor& weight) {
  return running_mean.defined() ? running_mean : weight;
}

void register_layer(const at::Tensor& key, const ProcessGroupPtr& group,
                    std::function<bool()> is_training) {
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  // Conversions are rare: a good time to drop the layers that are gone.
  std::erase_if(all.by_key, [](const auto& entry) { return entry.second.key.expired(); });
  all.by_key.insert_or_assign(key.unsafeGetTensorImpl(),
                              Layer{c10::weak_intrusive_ptr<at::TensorImpl>(key.getIntrusivePtr()),
                                    group, std::move(is_training)});
}

void unregister_layer(const at::Tensor& key) {
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  all.by_key.erase(key.unsafeGetTensorImpl());
}

std::optional<ProcessGroupPtr> converted_group(const at::Tensor& key) {
  const auto layer = find(key);
  return layer ? std::optional(layer->group) : std::nullopt;
}

std::optional<ProcessGroupPtr> find_layer(const at::Tensor& running_mean,
                                          const at::Tensor& weight) {
  const auto layer = find(layer_key(running_mean, weight));
  return layer && layer->is_training() ? std::optional(layer->group) : std::nullopt;
}

at::Tensor batch_norm_or_sync(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                              const std::optional<at::Tensor>& bias,
                              const std::optional<at::Tensor>& running_mean,
                              const std::optional<at::Tensor>& running_var, bool training,
                              double momentum, double eps, bool cudnn_enabled) {
  if (training) {
    const BatchNormArguments arguments{.input = input,
                                       .weight = value_or_undefined(weight),
                                       .bias = value_or_undefined(bias),
                                       .running_mean = value_or_undefined(running_mean),
                                       .running_var = value_or_undefined(running_var),
                                       .momentum = momentum,
                                       .eps = eps};
    if (const auto layer = find_layer(arguments.running_mean, arguments.weight)) {
      const ProcessGroupPtr group = statistics_group(*layer);
      if (group && group->getSize() > 1) return sync_batch_norm(arguments, group);
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

void install_batch_norm_override() {
  static const auto install = [](c10::DispatchKey key) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("batch_norm", &batch_norm_or_sync);
    return library;
  };
  // Never taken back: other threads may be inside. `used`: LeakSanitizer must find the pointers.
  [[gnu::used]] static const auto* const cpu = install(c10::DispatchKey::AutogradCPU);
  [[gnu::used]] static const auto* const cuda = install(c10::DispatchKey::AutogradCUDA);
}

}  // namespace detail

namespace {

struct FoundLayer {
  std::string name;
  at::Tensor key;
  std::weak_ptr<const torch::nn::Module> module;  ///< empty for a root that no shared_ptr owns
};

/// The running mean, or else the weight, of a batch-norm layer; nullopt for other modules.
std::optional<at::Tensor> batch_norm_key(const torch::nn::Module& module) {
  const auto key = [](const auto* layer) -> std::optional<at::Tensor> {
    if (layer == nullptr) return std::nullopt;
    return detail::layer_key(layer->running_mean, layer->weight);
  };
  if (auto found = key(module.as<torch::nn::BatchNorm1dImpl>())) return found;
  if (auto found = key(module.as<torch::nn::BatchNorm2dImpl>())) return found;
  return key(module.as<torch::nn::BatchNorm3dImpl>());
}

/// All batch-norm layers below a module, itself included, each once.
std::vector<FoundLayer> batch_norm_layers(torch::nn::Module& module) {
  std::vector<FoundLayer> found;
  const std::function<void(const std::string&, const torch::nn::Module&)> look =
      [&](const std::string& name, const torch::nn::Module& one) {
        if (const auto key = batch_norm_key(one))
          found.push_back({name, *key, one.weak_from_this()});
        for (const auto& child : one.named_children()) {
          look(name.empty() ? child.key() : name + "." + child.key(), *child.value());
        }
      };
  // Not named_modules(): it demands that the root is owned by a shared_ptr.
  look("", module);
  return found;
}

}  // namespace

ConvertReport convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroupPtr& group) {
  detail::install_batch_norm_override();
  ConvertReport report;
  for (const FoundLayer& layer : batch_norm_layers(module)) {
    if (!layer.key.defined()) {
      report.not_converted.push_back(
          {layer.name,
           "it has neither running statistics nor a weight to be recognised by; give it one of "
           "them, or use syncbn::dist::SyncBatchNorm"});
      continue;
    }
    detail::register_layer(layer.key, group, [weak = layer.module] {
      const auto module = weak.lock();
      return !module || module->is_training();
    });
    report.converted.push_back(layer.name);
  }
  return report;
}

void revert_sync_batchnorm(torch::nn::Module& module) {
  for (const FoundLayer& layer : batch_norm_layers(module)) {
    if (layer.key.defined()) detail::unregister_layer(layer.key);
  }
}

}  // namespace syncbn::dist
