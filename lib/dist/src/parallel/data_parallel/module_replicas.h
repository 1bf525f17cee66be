#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include "batch_norm/replica_scope.h"

namespace syncbn::dist::detail {

/// A module and its copies, one for each device. Replica 0 is the module.
class ModuleReplicas {
 public:
  virtual ~ModuleReplicas() = default;

  /// Gives the copies what the module has now: parameters, buffers, training or evaluation mode.
  virtual void refresh() = 0;

  /// The originals of a replica's tensors; empty for the module.
  const Originals& originals(int replica) const;

 protected:
  explicit ModuleReplicas(std::vector<at::Device> devices) : devices_(std::move(devices)) {}

  /// The tensors of a module or copy, in the same order in all.
  struct Tensors {
    std::vector<at::Tensor> parameters, buffers;
  };

  /// Sets the tensors of all replicas, the module's first.
  /// @throws base::UserError if they do not fit each other, or the module is on another device
  void set_tensors(const std::vector<Tensors>& all);
  void refresh_tensors();

  const std::vector<at::Device>& devices() const { return devices_; }

 private:
  struct Copy {
    std::vector<std::pair<at::Tensor, at::Tensor>> parameters, buffers;  ///< original and copy
    Originals originals;
  };

  const std::vector<at::Device> devices_;
  std::vector<Copy> copies_;  ///< of replicas 1 to the last
};

/// Replicas of a TorchScript module.
class ScriptReplicas : public ModuleReplicas {
 public:
  /// @param module to which all calls refer; outlives this
  ScriptReplicas(const torch::jit::Module& module, std::vector<at::Device> devices);

  /// Also replaces the copies of a module that was converted meanwhile.
  void refresh() override;
  torch::jit::Module& replica(int index) { return modules_[static_cast<size_t>(index)]; }

 private:
  void copy_module();

  const torch::jit::Module& module_;
  std::vector<torch::jit::Module> modules_;
};

}  // namespace syncbn::dist::detail
