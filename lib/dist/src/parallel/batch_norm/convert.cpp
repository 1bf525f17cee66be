#include "batch_norm/convert.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/_batch_norm_impl_index_native.h>
#include <ATen/ops/batch_norm_native.h>
#include <c10/util/ParallelGuard.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>

#include "batch_norm/batch_norm_function.h"
#include "batch_norm/batch_statistics_recorder.h"
#include "batch_norm/layer_naming.h"
#include "batch_norm/named_layers.h"
#include "batch_norm/replica.h"
#include "batch_norm/statistics_tape.h"
#include "groups/timeouts.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace detail {
namespace {

struct Entry {
  // Weak, so that a destroyed layer leaves its memory but not its address free: another tensor can
  // never be mistaken for it.
  c10::weak_intrusive_ptr<at::TensorImpl> key;
  std::shared_ptr<const ConvertedLayer> layer;
  /// It is converted no longer, but another handle may run the code of a conversion.
  bool was_reverted = false;
};

struct Layers {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Entry> by_key;

  void forget_destroyed() {
    std::vector<std::shared_ptr<const ConvertedLayer>> holding;
    {
      const std::lock_guard lock(mutex);
      for (const auto& [address, entry] : by_key) {
        if (entry.layer->let_go) holding.push_back(entry.layer);
      }
    }
    for (const auto& layer : holding) layer->let_go();
    const std::lock_guard lock(mutex);
    std::erase_if(by_key, [](const auto& item) { return item.second.key.expired(); });
  }
};

Layers& layers() {
  static auto* const instance = new Layers();  // backward threads may outlive static destructors
  return *instance;
}

std::shared_ptr<const ConvertedLayer> find(const at::Tensor& key, bool was_reverted = false) {
  if (!key.defined()) return nullptr;
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_key.find(key.unsafeGetTensorImpl());
  if (found == all.by_key.end()) return nullptr;
  const Entry& entry = found->second;
  return entry.key.expired() || entry.was_reverted != was_reverted ? nullptr : entry.layer;
}

/// A layer with is_it(key, layer); null when there is none.
template <class Condition>
std::shared_ptr<const ConvertedLayer> find_if(const Condition& is_it) {
  Layers& all = layers();
  const std::lock_guard lock(all.mutex);
  for (const auto& [address, entry] : all.by_key) {
    const auto key = entry.key.lock();
    if (key && !entry.was_reverted && is_it(at::Tensor(key), *entry.layer)) return entry.layer;
  }
  return nullptr;
}

at::Tensor value_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace

at::Tensor layer_key(const at::Tensor& running_mean, const at::Tensor& weight) {
  return running_mean.defined() ? running_mean : weight;
}

void register_layer(const at::Tensor& key, const at::Tensor& weight, ConvertedLayer layer) {
  layer.has_weight = weight.defined();
  const auto shared = std::make_shared<const ConvertedLayer>(std::move(layer));
  Layers& all = layers();
  all.forget_destroyed();  // conversions are rare: a good time for it
  const std::lock_guard lock(all.mutex);
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
    if (!tensor.defined()) continue;
    const auto found = all.by_key.find(tensor.unsafeGetTensorImpl());
    if (found == all.by_key.end()) continue;
    if (found->second.layer->is_script) {
      found->second.was_reverted = true;
    } else {
      all.by_key.erase(found);
    }
  }
}

size_t registered_keys() {
  Layers& all = layers();
  all.forget_destroyed();
  const std::lock_guard lock(all.mutex);
  return static_cast<size_t>(
      std::count_if(all.by_key.begin(), all.by_key.end(),
                    [](const auto& item) { return !item.second.was_reverted; }));
}

std::optional<ProcessGroupPtr> converted_group(const at::Tensor& key) {
  const auto layer = find(key);
  return layer ? std::optional(layer->group) : std::nullopt;
}

namespace {

/// @throws base::UserError for a replica of a converted layer inside data_parallel. Where no
///   gradient leads back to the original, of a layer without a weight or with a frozen one, any
///   converted layer of that size is taken for it.
void refuse_replica(const at::Tensor& running_mean, const at::Tensor& weight) {
  if (const auto original = find(original_of(weight))) throw_is_replica(*original->name);
  const bool has_weight = weight.defined();
  if (has_weight ? !is_replica(weight) : !c10::ParallelGuard::is_enabled()) return;
  const at::Tensor& values = has_weight ? weight : running_mean;
  const bool is_one =
      values.defined() && find_if([&](const at::Tensor& key, const auto& one) {
        return one.has_weight == has_weight && !one.is_script && key.numel() == values.numel();
      });
  if (is_one) throw_is_replica({});
}

/// What a layer threw last on this thread, for run_script().
thread_local std::exception_ptr thrown_by_layer;

template <class Body>
auto noting_what_is_thrown(const Body& body) {
  try {
    return body();
  } catch (const base::Error&) {
    thrown_by_layer = std::current_exception();
    throw;
  }
}

/// Of what calls aten::batch_norm with training=true: without running statistics it always does.
bool is_training(const ConvertedLayer& layer, const at::Tensor& running_mean) {
  return running_mean.defined() || layer.is_training();
}

/// @throws base::UserError for a converted layer in code from before, which other handles to its
///   TorchScript module, what that is part of and a DistributedDataParallel that was made before
///   run. Optimised by the executor, it hands on other tensors of the same memory.
void refuse_old_script(const at::Tensor& running_mean, const at::Tensor& weight) {
  const at::Tensor tensor = layer_key(running_mean, weight);
  if (!tensor.defined()) return;
  const auto layer = find_if([&](const at::Tensor& key, const ConvertedLayer& one) {
    return one.is_script && key.is_alias_of(tensor);
  });
  if (!layer || !is_training(*layer, running_mean)) return;
  noting_what_is_thrown([&] {
    throw base::UserError(fmt::format(
        "SyncBatchNorm: the TorchScript layer '{}' was converted, but runs in code from before; "
        "call the very module that convert_sync_batchnorm() was given, no other handle to it, nor "
        "what it is a part of; where DistributedDataParallel was made before, convert its module()",
        layer->name->given));
  });
}

/// The layer that these tensors belong to; null when it is not converted, or is being evaluated.
std::shared_ptr<const ConvertedLayer> find_layer(const BatchNormArguments& arguments) {
  const auto layer = find(layer_key(arguments.running_mean, arguments.weight));
  return layer && is_training(*layer, arguments.running_mean) ? layer : nullptr;
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

/// Tells libtorch's own batch_norm, called from here, from code that never came here.
thread_local bool in_plain_batch_norm = false;

at::Tensor plain_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& running_mean,
                            const std::optional<at::Tensor>& running_var, bool training,
                            double momentum, double eps, bool cudnn_enabled) {
  struct Inside {
    Inside() { in_plain_batch_norm = true; }
    ~Inside() { in_plain_batch_norm = false; }
  };
  const Inside inside;
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

BatchNormArguments arguments_of(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                                const std::optional<at::Tensor>& bias,
                                const std::optional<at::Tensor>& running_mean,
                                const std::optional<at::Tensor>& running_var, double momentum,
                                double eps) {
  return {.input = input,
          .weight = value_or_undefined(weight),
          .bias = value_or_undefined(bias),
          .running_mean = value_or_undefined(running_mean),
          .running_var = value_or_undefined(running_var),
          .num_batches_tracked = {},
          .momentum = momentum,
          .eps = eps,
          .residual = {}};
}

/// The output of a converted layer; nullopt where it is that of libtorch's own.
std::optional<at::Tensor> sync_batch_norm_of(const std::shared_ptr<const ConvertedLayer>& layer,
                                             const BatchNormArguments& arguments) {
  if (!layer) return std::nullopt;
  const ProcessGroupPtr group = group_to_exchange_over(*layer);
  // Alone it is libtorch's own, unless someone has to see each layer's statistics.
  if (!group && !TapeScope::is_open() && BatchStatisticsRecorder::current() == nullptr)
    return std::nullopt;
  return as_converted_layer(arguments, *layer, group);
}

/// @throws base::UserError for code of a conversion that was undone through another handle: with
///   libtorch's own the rank would go on with statistics of its own.
void refuse_reverted(const BatchNormArguments& arguments) {
  const auto layer =
      find(layer_key(arguments.running_mean, arguments.weight), /*was_reverted=*/true);
  if (!layer || !is_training(*layer, arguments.running_mean) || !group_to_exchange_over(*layer))
    return;
  throw base::UserError(
      fmt::format("SyncBatchNorm: the TorchScript layer '{}' was reverted through another handle "
                  "than the one that trains; to save it meanwhile, revert a clone(), or convert "
                  "the module that trains again (a DistributedDataParallel's module())",
                  layer->name->given));
}

/// The check that conversion takes out of a graph.
void refuse_one_value(const at::Tensor& input) {
  if (input.dim() < 2 || input.numel() == 0 || input.numel() != input.size(1)) return;
  throw base::UserError(
      fmt::format("SyncBatchNorm: one value per channel on one rank (input {}) has no variance to "
                  "train with; use a larger batch",
                  c10::str(input.sizes())));
}

/// aten::batch_norm, sharing the statistics of layers that were converted.
at::Tensor batch_norm_or_sync(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                              const std::optional<at::Tensor>& bias,
                              const std::optional<at::Tensor>& running_mean,
                              const std::optional<at::Tensor>& running_var, bool training,
                              double momentum, double eps, bool cudnn_enabled) {
  if (training) {
    const auto arguments =
        arguments_of(input, weight, bias, running_mean, running_var, momentum, eps);
    const auto layer = find_layer(arguments);
    if (!layer) refuse_replica(arguments.running_mean, arguments.weight);
    if (!layer || layer->is_script) {
      refuse_old_script(arguments.running_mean, arguments.weight);
    }
    if (const auto output = sync_batch_norm_of(layer, arguments)) return *output;
  }
  return plain_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                          cudnn_enabled);
}

using BatchNormImplIndex = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t>;

/// aten::_batch_norm_impl_index: what TorchScript's executor differentiates batch_norm into.
BatchNormImplIndex batch_norm_impl_index(const at::Tensor& input,
                                         const std::optional<at::Tensor>& weight,
                                         const std::optional<at::Tensor>& bias,
                                         const std::optional<at::Tensor>& running_mean,
                                         const std::optional<at::Tensor>& running_var,
                                         bool training, double momentum, double eps,
                                         bool cudnn_enabled) {
  if (training && !in_plain_batch_norm) {
    refuse_old_script(value_or_undefined(running_mean), value_or_undefined(weight));
  }
  return at::native::_batch_norm_impl_index(input, weight, bias, running_mean, running_var,
                                            training, momentum, eps, cudnn_enabled);
}

}  // namespace

at::Tensor script_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias,
                             const std::optional<at::Tensor>& running_mean,
                             const std::optional<at::Tensor>& running_var, bool training,
                             double momentum, double eps, bool cudnn_enabled) {
  if (training) {
    const auto arguments =
        arguments_of(input, weight, bias, running_mean, running_var, momentum, eps);
    const auto shared = noting_what_is_thrown([&] {
      auto output = sync_batch_norm_of(find_layer(arguments), arguments);
      if (output) return output;
      refuse_reverted(arguments);
      refuse_one_value(input);
      return output;
    });
    if (shared) return *shared;
  }
  return plain_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                          cudnn_enabled);
}

c10::IValue run_script(const std::function<c10::IValue()>& body) {
  thrown_by_layer = nullptr;
  try {
    return body();
  } catch (const std::exception&) {
    if (thrown_by_layer) std::rethrow_exception(std::exchange(thrown_by_layer, nullptr));
    throw;
  }
}

void install_batch_norm_override() {
  static const auto install = [](c10::DispatchKey key) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("batch_norm", &batch_norm_or_sync);
    library->impl("_batch_norm_impl_index", &batch_norm_impl_index);
    return library;
  };
  // Never taken back: other threads may be inside. `used`: LeakSanitizer must find the pointers.
  // The last two are for InferenceMode, in which autograd is out of the way.
  [[gnu::used]] static const std::array<const torch::Library*, 4> libraries{
      install(c10::DispatchKey::AutogradCPU), install(c10::DispatchKey::AutogradCUDA),
      install(c10::DispatchKey::CPU), install(c10::DispatchKey::CUDA)};
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
  if (sync_timeout)
    sync_timeout = detail::checked(*sync_timeout, "convert_sync_batchnorm: sync_timeout");
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
