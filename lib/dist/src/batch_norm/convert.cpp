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
#include "batch_norm/layer_naming.h"
#include "batch_norm/named_layers.h"
#include "batch_norm/replica.h"
#include "batch_norm/statistics_sink.h"
#include "batch_norm/statistics_tape.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace detail {
namespace {

struct Entry {
  // Weak, so that a destroyed layer leaves its memory but not its address free: another tensor can
  // never be mistaken for it.
  c10::weak_intrusive_ptr<at::TensorImpl> key;
  std::shared_ptr<const ConvertedLayer> layer;
};

struct Layers {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Entry> by_key;

  /// With the lock held.
  void forget_destroyed() {
    std::erase_if(by_key, [](const auto& entry) { return entry.second.key.expired(); });
  }
};

Layers& layers() {
  static auto* const instance = new Layers();  // backward threads may outlive static destructors
  return *instance;
}

std::shared_ptr<const ConvertedLayer> find(const at::Tensor& key) {
  if (!key.defined()) return nullptr;
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_key.find(key.unsafeGetTensorImpl());
  if (found == all.by_key.end() || found->second.key.expired()) return nullptr;
  return found->second.layer;
}

at::Tensor value_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace

at::Tensor layer_key(const at::Tensor& running_mean, const at::Tensor& weight) {
  return running_mean.defined() ? running_mean : weight;
}

void register_layer(const at::Tensor& key, const at::Tensor& weight, ConvertedLayer layer) {
  const auto shared = std::make_shared<const ConvertedLayer>(std::move(layer));
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  // Conversions are rare: a good time to drop the layers that are gone.
  all.forget_destroyed();
  for (const at::Tensor& tensor : {key, weight}) {
    if (!tensor.defined()) continue;
    all.by_key.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Entry{c10::weak_intrusive_ptr<at::TensorImpl>(tensor.getIntrusivePtr()), shared});
  }
}

void unregister_layer(const at::Tensor& key, const at::Tensor& weight) {
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  for (const at::Tensor& tensor : {key, weight}) {
    if (tensor.defined()) all.by_key.erase(tensor.unsafeGetTensorImpl());
  }
}

size_t registered_keys() {
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  all.forget_destroyed();
  return all.by_key.size();
}

std::optional<ProcessGroupPtr> converted_group(const at::Tensor& key) {
  const auto layer = find(key);
  return layer ? std::optional(layer->group) : std::nullopt;
}

namespace {

/// The layer that these tensors belong to; null when it is not converted, or is being evaluated.
/// @throws base::UserError for a replica of a converted layer.
std::shared_ptr<const ConvertedLayer> find_layer(const at::Tensor& running_mean,
                                                 const at::Tensor& weight) {
  if (auto layer = find(layer_key(running_mean, weight))) {
    return layer->is_training() ? layer : nullptr;
  }
  if (const auto original = find(original_of(weight))) throw_is_replica(*original->name);
  return nullptr;
}

/// Null where nothing is exchanged.
ProcessGroupPtr group_to_exchange_over(const ConvertedLayer& layer) {
  if (layer.alone) return nullptr;
  const ProcessGroupPtr group = statistics_group(layer.group);
  return group && group->getSize() > 1 ? group : nullptr;
}

at::Tensor as_converted_layer(const BatchNormArguments& arguments, const ConvertedLayer& layer,
                              const ProcessGroupPtr& group) {
  const BatchNormResult result = sync_batch_norm(arguments, {layer.name, group, layer.timeout});
  // The module has counted this batch already.
  const at::Tensor counter = result.updated ? at::Tensor() : layer.num_batches_tracked();
  if (counter.defined()) counter.sub_(1);
  return result.output;
}

}  // namespace

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
                                       .num_batches_tracked = {},
                                       .momentum = momentum,
                                       .eps = eps,
                                       .residual = {}};
    if (const auto layer = find_layer(arguments.running_mean, arguments.weight)) {
      const ProcessGroupPtr group = group_to_exchange_over(*layer);
      // Alone it is libtorch's own, unless someone has to see each layer's statistics.
      if (group || TapeScope::is_open() || StatisticsSink::current() != nullptr) {
        return as_converted_layer(arguments, *layer, group);
      }
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
  at::Tensor running_mean;
  at::Tensor weight;
  std::weak_ptr<const torch::nn::Module> module;  ///< empty for a root that no shared_ptr owns

  at::Tensor key() const { return detail::layer_key(running_mean, weight); }
};

/// Calls visit(layer) with the module as the batch-norm layer that it is, or not at all.
template <class Visit>
void visit_batch_norm(const torch::nn::Module& module, const Visit& visit) {
  if (const auto* one = module.as<torch::nn::BatchNorm1dImpl>()) return visit(*one);
  if (const auto* two = module.as<torch::nn::BatchNorm2dImpl>()) return visit(*two);
  if (const auto* three = module.as<torch::nn::BatchNorm3dImpl>()) visit(*three);
}

/// All batch-norm layers below a module, itself included, each once.
std::vector<FoundLayer> batch_norm_layers(const torch::nn::Module& module) {
  std::vector<FoundLayer> found;
  detail::for_each_named_module(module, [&](const std::string& name, const torch::nn::Module& one) {
    visit_batch_norm(one, [&](const auto& layer) {
      found.push_back({name, layer.running_mean, layer.weight, one.weak_from_this()});
    });
  });
  return found;
}

at::Tensor num_batches_tracked(const torch::nn::Module& module) {
  at::Tensor counter;
  visit_batch_norm(module, [&](const auto& layer) { counter = layer.num_batches_tracked; });
  return counter;
}

}  // namespace

ConvertReport convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroupPtr& group,
                                     std::optional<std::chrono::milliseconds> sync_timeout) {
  detail::install_batch_norm_override();
  detail::LayerNaming::name_layers(module);
  ConvertReport report;
  for (const FoundLayer& layer : batch_norm_layers(module)) {
    if (!layer.key().defined()) {
      report.not_converted.push_back(
          {layer.name,
           "it has neither running statistics nor a weight to be recognised by; give it one of "
           "them, or use syncbn::dist::SyncBatchNorm"});
      continue;
    }
    const auto is_training = [weak = layer.module] {
      const auto module = weak.lock();
      return !module || module->is_training();
    };
    const auto counter = [weak = layer.module] {
      const auto module = weak.lock();
      return module ? num_batches_tracked(*module) : at::Tensor();
    };
    detail::register_layer(
        layer.key(), layer.weight,
        {std::make_shared<detail::LayerName>(detail::LayerName{.given = layer.name}), group,
         sync_timeout, is_training, counter});
    report.converted.push_back(layer.name);
  }
  return report;
}

void revert_sync_batchnorm(torch::nn::Module& module) {
  for (const FoundLayer& layer : batch_norm_layers(module)) {
    detail::unregister_layer(layer.key(), layer.weight);
  }
}

}  // namespace syncbn::dist
