#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <syncbn/dist/pipeline_parallel.h>

#include "pipeline/schedule.h"
#include "pipeline/transfer.h"

namespace syncbn::dist::detail {

/// A stage and its place in the pipeline.
struct PlacedStage {
  PipelineStage stage;
  at::Device device;
  int index;
  std::vector<std::string> names;  ///< of all stages, for messages
  std::string place = {};          ///< " on rank 1 (host)"; empty in one process

  /// "stage 1 (Back)", of this stage or another
  std::string name() const { return name(index); }
  std::string name(int stage) const;
  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == static_cast<int>(names.size()); }
};

/// A stage's transfers from and to its neighbours; null where it has none.
struct StageTransfers {
  Transfer* inputs = nullptr;
  Transfer* outputs = nullptr;
  Transfer* input_gradients = nullptr;
  Transfer* output_gradients = nullptr;
};

/// One batch of a pipeline. The vectors have an entry for each micro-batch.
struct PipelineBatch {
  std::vector<at::Tensor> inputs;                ///< of the first stage
  std::vector<at::Tensor> targets;               ///< of the last stage
  bool is_training = true;                       ///< a backward follows
  const PipelineParallel::Loss* loss = nullptr;  ///< of the last stage, in training
  bool average_losses = true;
};

/// A stage during one step.
class StageRun {
 public:
  using Tensors = std::vector<at::Tensor>;

  StageRun(const PlacedStage& placed, const PipelineBatch& batch, const StageTransfers& transfers)
      : placed_(placed), batch_(batch), transfers_(transfers) {}

  /// @throws StageAbandoned if another stage fails, StageError if this one does; errors of a lost
  ///   peer or of memory unchanged
  void run(const PipelineActions& actions);

  // Valid on the last stage only:

  double loss() const { return loss_.defined() ? loss_.item<double>() : 0; }
  /// In the order of micro-batches; empty in training.
  const Tensors& outputs() const { return outputs_; }

 private:
  using Samples = std::vector<int64_t>;  ///< of each micro-batch of an action

  /// The tensors of a forward that its backward needs.
  struct Kept {
    Tensors inputs, outputs;
    Samples samples;
  };

  /// @param inputs set as soon as they are known, for error messages
  void forward(const PipelineAction& action, Tensors& inputs);
  void backward(const PipelineAction& action, bool is_last);
  Tensors receive(Transfer& transfer, const PipelineAction& action, Samples& samples) const;
  void send(Transfer& transfer, const Tensors& tensors, const Samples& samples) const;
  Tensors call(const Tensors& inputs) const;
  at::Tensor weighted_loss(const at::Tensor& output, const PipelineAction& action,
                           const Samples& samples);
  std::string describe(const PipelineAction& action, const Tensors& inputs) const;

  const PlacedStage& placed_;
  const PipelineBatch& batch_;
  const StageTransfers transfers_;
  std::map<int64_t, Kept> kept_;  ///< by first micro-batch
  size_t sent_ = 0;               ///< number of micro-batches whose outputs were sent
  at::Tensor loss_;
  Tensors outputs_;
};

}  // namespace syncbn::dist::detail
