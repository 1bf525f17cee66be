#pragma once

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

  /// Updates the copies from the module: parameters, buffers, training or evaluation mode.
  virtual void refresh() = 0;

  /// Without tensors for replica 0.
  const ReplicaTensors& tensors(int replica) const;

 protected:
  explicit ModuleReplicas(std::vector<at::Device> devices) : devices_(std::move(devices)) {}

  /// The tensors of a module or copy, in the same order in each.
  struct Tensors {
    std::vector<at::Tensor> parameters, buffers;
    bool is_of_module = false;  ///< the replica runs the module itself
  };

  /// Sets the tensors of all replicas, the module's first.
  /// @throws base::UserError if the replicas' tensors do not match
  void set_tensors(const std::vector<Tensors>& all);
  /// @throws base::UserError if the module is not on the first device
  void refresh_tensors();

  const std::vector<at::Device>& devices() const { return devices_; }

 private:
  struct Copy {
    std::vector<std::pair<at::Tensor, at::Tensor>> parameters, buffers;  ///< original and copy
    ReplicaTensors tensors;
  };

  const std::vector<at::Device> devices_;
  Tensors module_;
  ReplicaTensors first_;      ///< of replica 0
  std::vector<Copy> copies_;  ///< replicas 1 to the last
};

/// Replicas of a TorchScript module.
class ScriptReplicas : public ModuleReplicas {
 public:
  /// @param module the original, which must outlive this object
  ScriptReplicas(const torch::jit::Module& module, std::vector<at::Device> devices);

  /// Also makes new copies if the module was converted meanwhile.
  void refresh() override;
  torch::jit::Module& replica(int index) { return modules_[static_cast<size_t>(index)]; }

 private:
  void copy_module();

  const torch::jit::Module& module_;
  std::vector<torch::jit::Module> modules_;
};

}  // namespace syncbn::dist::detail
