#include "data_parallel/module_replicas.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/data_parallel.h>
#include <syncbn/dist/plain_message.h>

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "batch_norm/named_layers.h"

namespace syncbn::dist::detail {
namespace {

namespace autograd = torch::autograd;

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

}  // namespace

const Originals& ModuleReplicas::originals(int replica) const {
  static const Originals none;
  return replica == 0 ? none : copies_[static_cast<size_t>(replica - 1)].originals;
}

void ModuleReplicas::set_tensors(const std::vector<Tensors>& all) {
  const Tensors& module = all.front();
  for (const auto* list : {&module.parameters, &module.buffers}) {
    for (const at::Tensor& tensor : *list) {
      if (tensor.device() == devices_.front()) continue;
      throw base::UserError(
          fmt::format("DataParallel: the module has a tensor on {}, and the first of device_ids is "
                      "{}; move the "
                      "module there with to()",
                      tensor.device().str(), devices_.front().str()));
    }
  }
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
    const auto pair = [&](const auto& originals, const auto& own, auto& pairs) {
      check_tensors(originals, own, i);
      for (size_t j = 0; j < own.size(); ++j) {
        pairs.emplace_back(originals[j], own[j]);
        copy.originals[own[j].unsafeGetTensorImpl()] = originals[j].unsafeGetTensorImpl();
      }
    };
    pair(module.parameters, one.parameters, copy.parameters);
    pair(module.buffers, one.buffers, copy.buffers);
  }
}

void ModuleReplicas::refresh_tensors() {
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

namespace {

class EagerReplicas : public ModuleReplicas {
 public:
  EagerReplicas(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                std::vector<at::Device> devices)
      : ModuleReplicas(std::move(devices)), modules_(std::move(modules)) {
    std::vector<Tensors> all;
    for (const auto& module : modules_) {
      name_layers(*module);
      all.push_back({module->parameters(), module->buffers()});
      parts_.push_back(module->modules());
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
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<std::vector<std::shared_ptr<torch::nn::Module>>> parts_;  ///< modules() of each
};

/// Restores the state of the CPU's random generator on destruction: constructing a module draws its
/// initial values.
class KeptRandomState {
 public:
  KeptRandomState() : state_(generator().get_state()) {}
  ~KeptRandomState() { generator().set_state(state_); }
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

 private:
  static at::Generator generator() { return at::globalContext().defaultGenerator(at::kCPU); }
  at::Tensor state_;
};

}  // namespace

torch::nn::Module& replica_of(ModuleReplicas& replicas, int replica) {
  return static_cast<EagerReplicas&>(replicas).replica(replica);
}

std::shared_ptr<ModuleReplicas> replicate(std::vector<std::shared_ptr<torch::nn::Module>> replicas,
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
    if (std::find(replicas.begin(), replicas.begin() + static_cast<ptrdiff_t>(i), replicas[i]) !=
        replicas.begin() + static_cast<ptrdiff_t>(i)) {
      throw base::UserError(
          fmt::format("DataParallel: replica {} is given twice; make one for each device", i));
    }
    replicas[i]->to(devices[i]);
  }
  return std::make_shared<EagerReplicas>(std::move(replicas), devices);
}

std::shared_ptr<ModuleReplicas> replicate(std::shared_ptr<torch::nn::Module> module,
                                          const std::vector<at::Device>& devices) {
  if (!module) throw base::UserError("DataParallel: the module is null");
  std::vector<std::shared_ptr<torch::nn::Module>> replicas{module};
  const KeptRandomState kept;
  for (size_t i = 1; i < devices.size(); ++i) {
    try {
      replicas.push_back(module->clone());
    } catch (const std::exception& error) {
      throw base::UserError(
          fmt::format("DataParallel: a module of class {} cannot be cloned: {}; derive it and its "
                      "parts from torch::nn::Cloneable, or give DataParallel a replica for each "
                      "device",
                      module->name(), plain_message(error)));
    }
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
