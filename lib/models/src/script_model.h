#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/jit/api/module.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// A network scripted and saved in Python (torch.jit.script(), torch.jit.save()). Registers its
/// parameters, buffers and submodules under their names, so that optimizers,
/// DistributedDataParallel and checkpoints find them.
class ScriptModel : public Model {
 public:
  ScriptModel(torch::jit::Module script, bool labels_pixels);

  at::Tensor forward(at::Tensor input) override { return forward_all(std::move(input)).front(); }
  /// The tensors that the script returns, in their order; in evaluation mode, only the first.
  std::vector<at::Tensor> forward_all(at::Tensor input) override;
  bool labels_pixels() const override { return labels_pixels_; }
  void train(bool on = true) override;

  const torch::jit::Module& script() const { return script_; }

 private:
  torch::jit::Module script_;
  bool labels_pixels_;
};

/// The tensors of a value: itself, or the items of a tuple, list or dictionary, in their order.
std::vector<at::Tensor> tensors_in(const c10::IValue& value);

}  // namespace syncbn::models
