#include "batch_norm/convert.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/batch_norm.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <mutex>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/_batch_norm_impl_index_native.h>
#include <ATen/ops/batch_norm_native.h>
#include <c10/util/ParallelGuard.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include "batch_norm/batch_norm_function.h"
#include "batch_norm/named_layers.h"
#include "batch_norm/replica_scope.h"
#include "batch_norm/statistics_scopes.h"
#include "groups/world.h"
#include "transport/timeouts.h"

namespace syncbn::dist {
namespace detail {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using LayerPtr = std::shared_ptr<const ConvertedLayer>;

struct Entry {
  // A weak pointer keeps the address in use, so that no new tensor is mistaken for a destroyed one.
  c10::weak_intrusive_ptr<at::TensorImpl> key;
  LayerPtr layer;
  /// The layer was reverted, but another handle may still run converted code.
  bool was_reverted = false;
};

struct Registry {
  /// Guards the entries. None is destroyed under it: an entry may hold a tensor's memory, and the
  /// last reference to a group.
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Entry> by_key;

  void remove_destroyed() {
    std::vector<LayerPtr> to_release;
    {
      const std::lock_guard lock(mutex);
      for (const auto& [address, entry] : by_key) {
        if (entry.layer->release) to_release.push_back(entry.layer);
      }
    }
    for (const auto& layer : to_release) layer->release();
    std::vector<Entry> destroyed;
    const std::lock_guard lock(mutex);
    std::erase_if(by_key, [&](auto& item) {
      const bool is_gone = item.second.key.expired();
      if (is_gone) destroyed.push_back(std::move(item.second));
      return is_gone;
    });
  }
};

Registry& registry() {
  static auto* const instance = new Registry();  // backward threads may outlive static destructors
  return *instance;
}

LayerPtr find(const at::Tensor& key, bool was_reverted = false) {
  if (!key.defined()) return nullptr;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_key.find(ReplicaScope::original_of(key.unsafeGetTensorImpl()));
  if (found == all.by_key.end()) return nullptr;
  const Entry& entry = found->second;
  return entry.key.expired() || entry.was_reverted != was_reverted ? nullptr : entry.layer;
}

/// A layer for which is_it(key, layer) is true; null if there is none.
template <class Condition>
LayerPtr find_if(const Condition& is_it) {
  std::vector<std::pair<at::Tensor, LayerPtr>> candidates;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    for (const auto& [address, entry] : all.by_key) {
      if (entry.was_reverted) continue;
      if (auto key = entry.key.lock()) candidates.emplace_back(std::move(key), entry.layer);
    }
  }
  for (const auto& [key, layer] : candidates) {
    if (is_it(key, *layer)) return layer;
  }
  return nullptr;
}

/// @throws base::UserError for a replica of a converted layer inside data_parallel. A layer without
///   a weight, or with a frozen one, has no gradient that leads to the original: it counts as a
///   replica if a converted layer has the same size.
void refuse_replica(const BatchNormArguments& arguments) {
  const at::Tensor& weight = arguments.weight;
  const bool has_weight = weight.defined();
  if (has_weight ? !is_replica(weight) : !c10::ParallelGuard::is_enabled()) return;
  if (has_weight) {
    const auto* original = dynamic_cast<const torch::autograd::AccumulateGrad*>(
        weight.grad_fn()->next_edge(0).function.get());
    const auto layer = original != nullptr ? find(original->variable) : nullptr;
    if (layer) throw_is_replica(*layer->name);
  }
  const at::Tensor values = has_weight ? weight : arguments.running_mean;
  const bool is_one =
      values.defined() && find_if([&](const at::Tensor& key, const auto& one) {
        return one.has_weight == has_weight && !one.is_script && key.numel() == values.numel();
      });
  if (is_one) throw_is_replica({});
}

/// The last error of a layer on this thread, for run_script().
thread_local std::exception_ptr layer_error;

template <class Body>
auto recording_error(const Body& body) {
  try {
    return body();
  } catch (const base::Error&) {
    layer_error = std::current_exception();
    throw;
  }
}

/// Evaluation without running statistics calls aten::batch_norm with training=true as well.
bool is_training(const ConvertedLayer& layer, const at::Tensor& running_mean) {
  return running_mean.defined() || layer.is_training();
}

/// @throws base::UserError for a converted TorchScript layer that runs in unconverted code. Other
///   handles to its module, modules that contain it, and a DistributedDataParallel made before the
///   conversion run such code. The executor may have replaced the layer's tensors by aliases.
void refuse_old_script(const at::Tensor& running_mean, const at::Tensor& weight) {
  const at::Tensor tensor = layer_key(running_mean, weight);
  if (!tensor.defined()) return;
  const auto layer = find_if([&](const at::Tensor& key, const ConvertedLayer& one) {
    return one.is_script && key.is_alias_of(tensor);
  });
  if (!layer || !is_training(*layer, running_mean)) return;
  recording_error([&] {
    throw base::UserError(fmt::format(
        "SyncBatchNorm: the TorchScript layer '{}' was converted, but runs in code from before; "
        "call the module that convert_sync_batchnorm() was given, not another handle to it or a "
        "module that contains it; if DistributedDataParallel was made before, convert its module()",
        layer->name->given));
  });
}

/// The layer of these tensors; null if it is not converted, or in evaluation.
LayerPtr find_in_training(const BatchNormArguments& arguments, bool was_reverted = false) {
  const auto layer = find(layer_key(arguments.running_mean, arguments.weight), was_reverted);
  return layer && is_training(*layer, arguments.running_mean) ? layer : nullptr;
}

/// Null: the layer exchanges nothing.
ProcessGroupPtr group_of(const ConvertedLayer& layer) {
  if (layer.is_local) return nullptr;
  const ProcessGroupPtr group = statistics_group(layer.group);
  return group && group->getSize() > 1 ? group : nullptr;
}

bool shares_statistics(const ConvertedLayer& layer) {
  const bool has_replicas = ReplicaScope::current() != nullptr && !layer.is_local;
  return has_replicas || group_of(layer);
}

/// The output of `layer`, which may be null; nullopt if libtorch's own batch_norm must compute it.
OptionalTensor sync_output(const LayerPtr& layer, const BatchNormArguments& arguments) {
  if (!layer) return std::nullopt;
  if (!TapeScope::is_open() && BatchStatisticsRecorder::current == nullptr &&
      !shares_statistics(*layer)) {
    return std::nullopt;
  }
  const GetGroup group = layer->is_local ? GetGroup() : [&] { return group_of(*layer); };
  const BatchNormResult result = sync_batch_norm(arguments, *layer->name, group, layer->timeout);
  // Takes back the module's count of a batch that did not update the statistics. Replicas other
  // than 0 have counted it in their own copies.
  const ReplicaScope* const replica = ReplicaScope::current();
  const bool counts = replica == nullptr || replica->replica() == 0;
  const at::Tensor counter =
      result.updated || !counts ? at::Tensor() : layer->num_batches_tracked();
  if (counter.defined()) counter.sub_(1);
  return result.output;
}

OptionalTensor eager_output(const BatchNormArguments& arguments) {
  const auto layer = find_in_training(arguments);
  if (!layer) refuse_replica(arguments);
  if (!layer || layer->is_script) refuse_old_script(arguments.running_mean, arguments.weight);
  return sync_output(layer, arguments);
}

/// @throws base::UserError if the layer was reverted through another handle: libtorch's batch_norm
///   would use only this rank's statistics.
void refuse_reverted(const BatchNormArguments& arguments) {
  const auto layer = find_in_training(arguments, /*was_reverted=*/true);
  if (!layer || !group_of(*layer)) return;
  throw base::UserError(
      fmt::format("SyncBatchNorm: the TorchScript layer '{}' was reverted through another handle "
                  "than the one that trains; to save it meanwhile, revert a clone(), or convert "
                  "the module that trains again (a DistributedDataParallel's module())",
                  layer->name->given));
}

/// The check that the conversion of a TorchScript module removes from its graph.
void refuse_one_value(const at::Tensor& input) {
  if (input.dim() < 2 || input.numel() == 0 || input.numel() != input.size(1)) return;
  throw base::UserError(
      fmt::format("SyncBatchNorm: one value per channel on one rank (input {}) has no variance to "
                  "train with; use a larger batch",
                  c10::str(input.sizes())));
}

OptionalTensor script_output(const BatchNormArguments& arguments) {
  return recording_error([&] {
    auto output = sync_output(find_in_training(arguments), arguments);
    if (!output) {
      refuse_reverted(arguments);
      refuse_one_value(arguments.input);
    }
    return output;
  });
}

/// Whether this thread is in libtorch's own batch_norm, called from batch_norm().
thread_local bool in_own_batch_norm = false;

/// Whether this is the aten::batch_norm of the thread's OneValueForward, which ends then.
bool ends_one_value_forward(const OptionalTensor& running_mean, const OptionalTensor& weight) {
  OneValueForward& forward = OneValueForward::current;
  if (forward.layer == nullptr) return false;
  const at::Tensor none;
  const at::Tensor& key = layer_key(running_mean ? *running_mean : none, weight ? *weight : none);
  if (ReplicaScope::original_of(key.unsafeGetTensorImpl()) != forward.key) return false;
  if (!running_mean || !running_mean->defined()) forward.options->track_running_stats(false);
  forward = {};
  return true;
}

/// aten::batch_norm, and TorchScript's syncbn::batch_norm. In training, returns kSyncOutput()'s
/// output if there is one.
template <OptionalTensor (*kSyncOutput)(const BatchNormArguments&)>
at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& weight,
                      const OptionalTensor& bias, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var, bool training, double momentum, double eps,
                      bool cudnn_enabled) {
  if (ends_one_value_forward(running_mean, weight)) training = true;
  if (training) {
    const auto or_undefined = [](const OptionalTensor& tensor) {
      return tensor.value_or(at::Tensor());
    };
    const auto output = kSyncOutput({.input = input,
                                     .weight = or_undefined(weight),
                                     .bias = or_undefined(bias),
                                     .running_mean = or_undefined(running_mean),
                                     .running_var = or_undefined(running_var),
                                     .num_batches_tracked = {},
                                     .momentum = momentum,
                                     .eps = eps,
                                     .residual = {}});
    if (output) return *output;
  }
  in_own_batch_norm = true;
  const auto scope = c10::make_scope_exit([] { in_own_batch_norm = false; });
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

/// aten::_batch_norm_impl_index, into which TorchScript's executor differentiates batch_norm.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t> batch_norm_impl_index(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
    double momentum, double eps, bool cudnn_enabled) {
  if (training && !in_own_batch_norm) {
    refuse_old_script(running_mean.value_or(at::Tensor()), weight.value_or(at::Tensor()));
  }
  return at::native::_batch_norm_impl_index(input, weight, bias, running_mean, running_var,
                                            training, momentum, eps, cudnn_enabled);
}

const torch::Library* define_script_operators() {
  auto* library =
      new torch::Library(torch::Library::DEF, "syncbn", std::nullopt, __FILE__, __LINE__);
  library->def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> "
      "Tensor",
      &batch_norm<script_output>);
  library->def("raise_on_one_rank(str msg, str? cls=None) -> ()",
               [](const std::string&, const std::optional<std::string>&) {});
  return library;
}

const torch::Library* override_batch_norm(c10::DispatchKey key) {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl("batch_norm", &batch_norm<eager_output>);
  library->impl("_batch_norm_impl_index", &batch_norm_impl_index);
  return library;
}

}  // namespace

void register_layer(const at::Tensor& running_mean, const at::Tensor& weight,
                    ConvertedLayer layer) {
  layer.has_weight = weight.defined();
  const auto shared = std::make_shared<const ConvertedLayer>(std::move(layer));
  Registry& all = registry();
  all.remove_destroyed();
  std::vector<Entry> replaced;
  const std::lock_guard lock(all.mutex);
  for (const at::Tensor& tensor : {running_mean, weight}) {
    if (!tensor.defined()) continue;
    Entry entry{c10::weak_intrusive_ptr<at::TensorImpl>(tensor.getIntrusivePtr()), shared};
    const auto [found, is_new] = all.by_key.try_emplace(tensor.unsafeGetTensorImpl(), entry);
    if (!is_new) replaced.push_back(std::exchange(found->second, std::move(entry)));
  }
}

void unregister_layer(const at::Tensor& running_mean, const at::Tensor& weight) {
  Registry& all = registry();
  std::vector<Entry> removed;
  const std::lock_guard lock(all.mutex);
  for (const at::Tensor& tensor : {running_mean, weight}) {
    if (!tensor.defined()) continue;
    const auto found = all.by_key.find(tensor.unsafeGetTensorImpl());
    if (found == all.by_key.end()) continue;
    if (found->second.layer->is_script) {
      found->second.was_reverted = true;
    } else {
      removed.push_back(std::move(found->second));
      all.by_key.erase(found);
    }
  }
}

size_t registered_keys() {
  Registry& all = registry();
  all.remove_destroyed();
  const std::lock_guard lock(all.mutex);
  return static_cast<size_t>(std::ranges::count_if(
      all.by_key, [](const auto& item) { return !item.second.was_reverted; }));
}

std::optional<ProcessGroupPtr> converted_group(const at::Tensor& running_mean,
                                               const at::Tensor& weight) {
  const auto layer = find(layer_key(running_mean, weight));
  return layer ? std::optional(layer->group) : std::nullopt;
}

// The gradient of a replica's parameter goes through a ReduceAdd node to the original's
// AccumulateGrad. Recognises the node by its name, because the header of its class is large.
bool is_replica(const at::Tensor& parameter) {
  return parameter.defined() && parameter.grad_fn() && parameter.grad_fn()->num_outputs() == 1 &&
         parameter.grad_fn()->name().find("ReduceAdd") != std::string::npos;
}

void throw_is_replica(const LayerName& layer) {
  throw base::UserError(fmt::format(
      "SyncBatchNorm: {} runs as a replica of torch::nn::parallel::data_parallel, whose "
      "threads are not ranks and would exchange over one process group at once; use "
      "syncbn::dist::DataParallel, or DistributedDataParallel with one process per device",
      layer.given.empty() ? "a layer" : fmt::format("layer '{}'", layer.given)));
}

thread_local OneValueForward OneValueForward::current;

void make_convertible(torch::nn::Module& module) {
  for_each_named_module(module, [](const std::string&, torch::nn::Module& one) {
    visit_batch_norm(one, []<class Layer>(Layer& layer) {
      if (typeid(layer) != typeid(Layer)) return;
      static const ConvertibleBatchNorm<Layer> other(torch::nn::BatchNormOptions(1));
      static_assert(sizeof(other) == sizeof(layer));
      layer.name();  // keeps its first answer, the name of libtorch's class
      // The first word of an object points to its class (Itanium C++ ABI).
      std::memcpy(static_cast<void*>(&layer), static_cast<const void*>(&other), sizeof(void*));
    });
  });
}

bool shares_statistics(const at::Tensor& running_mean, const at::Tensor& weight) {
  const auto layer = find(layer_key(running_mean, weight));
  return layer && shares_statistics(*layer);
}

void install_operators() {
  // Never removed: other threads may be inside. `used` because LeakSanitizer must find the
  // pointers. InferenceMode skips the autograd keys, hence CPU and CUDA.
  [[gnu::used]] static const std::array<const torch::Library*, 5> libraries{
      define_script_operators(), override_batch_norm(c10::DispatchKey::AutogradCPU),
      override_batch_norm(c10::DispatchKey::AutogradCUDA),
      override_batch_norm(c10::DispatchKey::CPU), override_batch_norm(c10::DispatchKey::CUDA)};
}

c10::IValue run_script(const std::function<c10::IValue()>& body) {
  layer_error = nullptr;
  try {
    return body();
  } catch (const std::exception&) {
    if (layer_error) std::rethrow_exception(std::exchange(layer_error, nullptr));
    throw;
  }
}

}  // namespace detail

ConvertReport convert_sync_batchnorm(torch::nn::Module& module, const GroupOrDefault& group,
                                     std::optional<std::chrono::milliseconds> sync_timeout) {
  sync_timeout = detail::checked(sync_timeout, "convert_sync_batchnorm: sync_timeout");
  detail::install_operators();
  detail::name_layers(module);
  detail::make_convertible(module);
  ConvertReport report;
  const auto convert = [&]<class Layer>(const std::string& name, const Layer& layer) {
    if (!detail::layer_key(layer.running_mean, layer.weight).defined()) {
      report.not_converted.push_back(
          {name,
           "it has neither running statistics nor a weight to be recognised by; give it one of "
           "them, or use syncbn::dist::SyncBatchNorm"});
      return;
    }
    // Null for a root that no shared_ptr owns.
    const auto weak = layer.weak_from_this();
    const auto is_training = [weak] {
      const auto owner = weak.lock();
      return !owner || owner->is_training();
    };
    const auto counter = [weak] {
      const auto owner = weak.lock();
      return owner ? owner->template as<Layer>()->num_batches_tracked : at::Tensor();
    };
    detail::register_layer(layer.running_mean, layer.weight,
                           {std::make_shared<detail::LayerName>(detail::LayerName{.given = name}),
                            group, sync_timeout, is_training, counter});
    report.converted.push_back(name);
    if (dynamic_cast<const detail::ConvertibleBatchNorm<Layer>*>(&layer) != nullptr) return;
    report.refuse_one_value.push_back({name,
                                       "its class is derived from libtorch's; derive it from "
                                       "dist::BatchNorm1dImpl, 2d or 3d"});
  };
  detail::for_each_named_module(module, [&](const std::string& name, const torch::nn::Module& one) {
    detail::visit_batch_norm(one, [&](const auto& layer) { convert(name, layer); });
    const auto* const own = one.as<SyncBatchNormImpl>();
    if (own == nullptr) return;
    const ProcessGroupPtr& group_of_layer = own->options.process_group();
    if (group_of_layer != ProcessGroupPtr(group) || own->options.group_size() > 0) {
      report.keep_group.push_back(name);
    }
  });
  return report;
}

void revert_sync_batchnorm(torch::nn::Module& module) {
  detail::for_each_named_module(module, [](const std::string&, const torch::nn::Module& one) {
    detail::visit_batch_norm(
        one, [](const auto& layer) { detail::unregister_layer(layer.running_mean, layer.weight); });
  });
}

}  // namespace syncbn::dist
