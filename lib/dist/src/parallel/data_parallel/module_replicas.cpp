#include "data_parallel/module_replicas.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/data_parallel.h>
#include <syncbn/dist/kept_random_state.h>

#include <algorithm>
#include <typeinfo>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"
#include "torchscript/script_module.h"

namespace syncbn::dist::detail {
namespace {

namespace autograd = torch::autograd;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// Makes `copy` share the memory of `original`.
void share(const at::Tensor& original, at::Tensor& copy) {
  const bool is_shared = copy.data_ptr() == original.data_ptr() &&
                         copy.scalar_type() == original.scalar_type() &&
                         copy.sizes() == original.sizes() && copy.strides() == original.strides();
  if (!is_shared) copy.set_data(original);
}

/// Makes gradients of `copy` flow to `edge`; with an invalid edge, `copy` needs none.
void lead_gradients(const at::Tensor& copy, const autograd::Edge& edge) {
  if (!at::GradMode::is_enabled()) return;  // an earlier graph may still need it
  if (!edge.is_valid()) {
    if (copy.requires_grad()) copy.detach_();
  } else if (copy.grad_fn() != edge.function) {
    autograd::impl::set_gradient_edge(copy, edge);
  }
}

void refresh_parameter(const at::Tensor& original, at::Tensor& copy, at::Device device) {
  if (original.device() == device) {
    share(original, copy);
    lead_gradients(copy, autograd::impl::gradient_edge(original));
    return;
  }
  const at::Tensor moved = original.to(device, /*non_blocking=*/true);
  copy.set_data(moved.detach());
  lead_gradients(copy, autograd::impl::gradient_edge(moved));
}

/// @throws base::UserError if a replica has a tensor of another shape, or the module's own
void check_tensors(const std::vector<at::Tensor>& module, const std::vector<at::Tensor>& replica,
                   size_t index) {
  for (size_t i = 0; i < module.size(); ++i) {
    if (replica[i].is_same(module[i])) {
      throw base::UserError(fmt::format(
          "DataParallel: replica {} shares tensors with the module (one of the shape {}); give it "
          "parts of its own",
          index, c10::str(module[i].sizes())));
    }
    if (replica[i].sizes() == module[i].sizes()) continue;
    throw base::UserError(fmt::format(
        "DataParallel: replica {} has a tensor of the shape {} where the module has {}; make "
        "it with the same options",
        index, c10::str(replica[i].sizes()), c10::str(module[i].sizes())));
  }
}

/// Calls an operator with the replica's tensors in place of the module's.
void call_with_own_tensors(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = static_cast<ptrdiff_t>(op.schema().arguments().size());
  for (auto it = stack->end() - arguments; it != stack->end(); ++it) {
    *it = map_tensors(*it, &ReplicaScope::own);
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(kReplicaKey);
  op.callBoxed(stack);
}

const torch::Library* install_replica_key() {
  auto* library = new torch::Library(torch::Library::IMPL, "_", kReplicaKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&call_with_own_tensors>());
  return library;
}

class EagerReplicas : public ModuleReplicas {
 public:
  /// @param modules one for each device, all different or all the same
  EagerReplicas(std::vector<ModulePtr> modules, std::vector<at::Device> devices)
      : ModuleReplicas(std::move(devices)), modules_(std::move(modules)) {
    std::vector<Tensors> all;
    for (size_t i = 0; i < modules_.size(); ++i) {
      torch::nn::Module& module = *modules_[i];
      name_layers(module);
      make_convertible(module);  // the module may be converted later
      all.push_back({module.parameters(), module.buffers(), i > 0 && modules_[i] == modules_[0]});
      Tensors& own = all.back();
      parts_.push_back(module.modules());
      if (!own.is_of_module) continue;
      [[gnu::used]] static const torch::Library* const library = install_replica_key();
      const at::Device device = this->devices()[i];
      for (at::Tensor& one : own.parameters) one = one.detach().to(device);
      for (at::Tensor& one : own.buffers) {
        one = one.detach().to(device, one.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      }
    }
    set_tensors(all);
  }

  void refresh() override {
    for (size_t i = 1; i < modules_.size(); ++i) {
      // train() is recursive: outer modules come first.
      for (size_t j = 0; j < parts_[i].size(); ++j) {
        const bool on = parts_[0][j]->is_training();
        if (parts_[i][j]->is_training() != on) parts_[i][j]->train(on);
      }
    }
    refresh_tensors();
  }

  torch::nn::Module& replica(int index) { return *modules_[static_cast<size_t>(index)]; }

 private:
  std::vector<ModulePtr> modules_;
  std::vector<std::vector<ModulePtr>> parts_;  ///< modules() of each
};

/// Whether the copy and its parts are of the same classes as the module's. Cloneable<Base>::clone()
/// of a class derived from Base returns a Base, and a container of such an object registers null.
/// @param copy its batch-norm layers become convertible, as the module's are
bool has_same_classes(const ModulePtr& module, const ModulePtr& copy) {
  if (!copy || !std::ranges::equal(module->children(), copy->children(), has_same_classes))
    return false;
  make_convertible(*copy);
  const torch::nn::Module &one = *module, &other = *copy;
  return typeid(one) == typeid(other);
}

}  // namespace

const ReplicaTensors& ModuleReplicas::tensors(int replica) const {
  return replica == 0 ? first_ : copies_[static_cast<size_t>(replica - 1)].tensors;
}

void ModuleReplicas::set_tensors(const std::vector<Tensors>& all) {
  module_ = all.front();
  const Tensors& module = module_;
  copies_.clear();
  for (size_t i = 1; i < all.size(); ++i) {
    const Tensors& one = all[i];
    if (one.parameters.size() != module.parameters.size() ||
        one.buffers.size() != module.buffers.size()) {
      throw base::UserError(fmt::format(
          "DataParallel: replica {} has {} parameters and {} buffers, the module {} and {}", i,
          one.parameters.size(), one.buffers.size(), module.parameters.size(),
          module.buffers.size()));
    }
    Copy& copy = copies_.emplace_back();
    first_.is_of_module = copy.tensors.is_of_module = one.is_of_module;
    const auto pair = [&](const auto& originals, const auto& own, auto& pairs) {
      check_tensors(originals, own, i);
      for (size_t j = 0; j < own.size(); ++j) {
        pairs.emplace_back(originals[j], own[j]);
        const at::TensorImpl* const original = originals[j].unsafeGetTensorImpl();
        copy.tensors.originals[own[j].unsafeGetTensorImpl()] = original;
        if (one.is_of_module) copy.tensors.copies[original] = own[j];
      }
    };
    pair(module.parameters, one.parameters, copy.parameters);
    pair(module.buffers, one.buffers, copy.buffers);
  }
}

void ModuleReplicas::refresh_tensors() {
  for (const auto* list : {&module_.parameters, &module_.buffers}) {
    for (const at::Tensor& tensor : *list) {
      if (tensor.device() == devices_.front()) continue;
      throw base::UserError(
          fmt::format("DataParallel: the module has a tensor on {}, and the first of device_ids is "
                      "{}; move the module there with to()",
                      tensor.device().str(), devices_.front().str()));
    }
  }
  for (size_t i = 0; i < copies_.size(); ++i) {
    const at::Device device = devices_[i + 1];
    for (auto& [original, copy] : copies_[i].parameters) refresh_parameter(original, copy, device);
    const at::NoGradGuard no_grad;
    for (auto& [original, copy] : copies_[i].buffers) {
      if (copy.sizes() == original.sizes() && copy.scalar_type() == original.scalar_type()) {
        copy.copy_(original, /*non_blocking=*/true);
      } else {
        copy.set_data(original.to(device, original.scalar_type(), /*non_blocking=*/false,
                                  /*copy=*/true));
      }
    }
  }
}

torch::nn::Module& replica_of(ModuleReplicas& replicas, int replica) {
  return static_cast<EagerReplicas&>(replicas).replica(replica);
}

std::shared_ptr<ModuleReplicas> replicate(std::vector<ModulePtr> replicas,
                                          const std::vector<at::Device>& devices) {
  if (replicas.size() != devices.size()) {
    throw base::UserError(
        fmt::format("DataParallel: {} replicas are given for {} devices; give one module for each",
                    replicas.size(), devices.size()));
  }
  const auto null = std::ranges::find(replicas, nullptr);
  if (null != replicas.end()) {
    throw base::UserError(
        fmt::format("DataParallel: the module of replica {} is null", null - replicas.begin()));
  }
  for (size_t i = 1; i < replicas.size(); ++i) {
    if (std::ranges::find(replicas, replicas[i]) != replicas.begin() + static_cast<ptrdiff_t>(i)) {
      throw base::UserError(
          fmt::format("DataParallel: replica {} is given twice; make one for each device", i));
    }
    replicas[i]->to(devices[i]);
  }
  return std::make_shared<EagerReplicas>(std::move(replicas), devices);
}

std::shared_ptr<ModuleReplicas> replicate(ModulePtr module,
                                          const std::vector<at::Device>& devices) {
  if (!module) throw base::UserError("DataParallel: the module is null");
  std::vector<ModulePtr> replicas{module};
  const KeptRandomState kept;
  make_convertible(*module);
  for (size_t i = 1; i < devices.size(); ++i) {
    ModulePtr copy;
    try {
      copy = module->clone();
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error&) {  // its class, or that of a part, has no clone()
    } catch (const base::UserError&) {
    }
    if (!has_same_classes(module, copy)) {
      return std::make_shared<EagerReplicas>(std::vector(devices.size(), module), devices);
    }
    replicas.push_back(std::move(copy));
  }
  return replicate(std::move(replicas), devices);
}

ScriptReplicas::ScriptReplicas(const torch::jit::Module& module, std::vector<at::Device> devices)
    : ModuleReplicas(std::move(devices)), module_(module) {
  copy_module();
}

void ScriptReplicas::copy_module() {
  modules_.assign(1, module_);
  for (size_t i = 1; i < devices().size(); ++i) {
    // The copy keeps the module's type, so that all run the same code. deepcopy(device) would not
    // copy tensors that are on the device already.
    modules_.push_back(module_.deepcopy());
    modules_.back().to(devices()[i]);
  }
  std::vector<Tensors> all;
  for (const torch::jit::Module& module : modules_) {
    Tensors& tensors = all.emplace_back();
    for (const at::Tensor& parameter : module.parameters()) tensors.parameters.push_back(parameter);
    for (const at::Tensor& buffer : module.buffers()) tensors.buffers.push_back(buffer);
  }
  set_tensors(all);
}

void ScriptReplicas::refresh() {
  if (module_._ivalue() != modules_.front()._ivalue()) copy_module();
  for (size_t i = 1; i < modules_.size(); ++i) {
    auto part = modules_[i].modules().begin();
    for (const torch::jit::Module& original : module_.modules()) {
      torch::jit::Module copy = *part;
      if (copy.is_training() != original.is_training()) {
        copy.setattr("training", original.is_training());
      }
      ++part;
    }
  }
  refresh_tensors();
}

}  // namespace syncbn::dist::detail
