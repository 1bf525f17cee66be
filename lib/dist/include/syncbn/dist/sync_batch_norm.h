#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

// torch::nn::Module, ModuleHolder and Cloneable; FORWARD_HAS_DEFAULT_ARGS and AnyValue.
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <syncbn/dist/process_group.h>

namespace torch::jit {
struct Module;
}

namespace syncbn::dist {

namespace detail {
struct LayerName;
class LayerNaming;
}  // namespace detail

/// Options of SyncBatchNorm; the same names and defaults as torch.nn.SyncBatchNorm.
struct SyncBatchNormOptions {
  SyncBatchNormOptions(int64_t num_features) : num_features_(num_features) {}  // NOLINT: as torch's

  /// C of an input of shape [N, C, ...].
  TORCH_ARG(int64_t, num_features);
  /// Added to the variance for numerical stability.
  TORCH_ARG(double, eps) = 1e-5;
  /// Weight of the new value in running_mean and running_var; nullopt: cumulative average.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Learn a scale and a shift per channel.
  TORCH_ARG(bool, affine) = true;
  /// Keep running statistics for evaluation; without them, evaluation uses the batch's.
  TORCH_ARG(bool, track_running_stats) = true;
  /// The ranks that share statistics; empty: all ranks, through a group of SyncBatchNorm's own.
  TORCH_ARG(ProcessGroupPtr, process_group) = {};

  // What torch.nn.SyncBatchNorm does not have.

  /// Statistics over groups of so many neighbouring ranks (0 … n-1, n … 2n-1, …), which must
  /// divide the number of ranks; 0: over all. Not together with process_group.
  TORCH_ARG(int, group_size) = 0;
  /// The longest that an exchange may take; the group's timeout when not given.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, sync_timeout) = std::nullopt;
  /// Apply ReLU to the result, in one with the layer. On CPUs the result may be changed in place;
  /// on GPUs backward needs it as it was, and throws otherwise, as torch.relu's does.
  TORCH_ARG(bool, fuse_relu) = false;
  /// What messages call the layer, and what is compared between ranks. When empty, the name in
  /// DistributedDataParallel's module or in that which convert_sync_batchnorm() was called with;
  /// outside both, the number of the layer in the order in which the group's layers first ran.
  TORCH_ARG(std::string, name) = {};
};

/// Batch normalisation with statistics over the batches of all ranks of a process group
/// (Ioffe and Szegedy, arXiv:1502.03167; twin of torch.nn.SyncBatchNorm).
///
/// Input [N, C, ...] of 2 to 5 dimensions on the CPU or a CUDA device, float32, float64, float16 or
/// bfloat16; N may differ between ranks and be 0. Output, gradients and running statistics are
/// those of torch::nn::BatchNorm on the concatenation of all ranks' inputs. Statistics are computed
/// in float32 or better, merged by Chan, Golub and LeVeque's formula, with an exact count.
///
/// Every rank of the group runs each forward (and its backward) the same number of times; on CPUs,
/// ranks that are in different layers are told so, both, and a rank that does not come is named at
/// the timeout. In evaluation mode, or in a group of one rank, nothing is exchanged.
/// DistributedDataParallel is not needed for the statistics. Gradients of gradients
/// (create_graph=true) work; they exchange once more per order.
///
/// Unlike PyTorch's, it works on CPUs, keeps precision for small variances, and does not count on
/// every rank having the same batch. A batch that is empty on every rank changes no buffer.
///
/// @throws (forward) base::UserError when WORLD_SIZE is above 1 and init_process_group was not
///   called, for an input of the wrong shape, when all ranks together have one value per channel,
///   when the ranks are in different layers, or inside torch::nn::parallel::data_parallel, whose
///   replicas are no ranks; base::UnavailableError when a peer fails. Not to be called from two
///   threads at a time.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(const SyncBatchNormOptions& options);

  /// @param residual of the input's sizes: added to the result, ahead of ReLU.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});
  void reset() override;
  void reset_parameters();
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;
  at::Tensor weight;               ///< [C], undefined without affine
  at::Tensor bias;                 ///< [C], undefined without affine
  at::Tensor running_mean;         ///< [C], undefined without track_running_stats
  at::Tensor running_var;          ///< [C], unbiased
  at::Tensor num_batches_tracked;  ///< scalar int64

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 private:
  friend class detail::LayerNaming;
  std::shared_ptr<detail::LayerName> name_;
};
TORCH_MODULE(SyncBatchNorm);

/// What a conversion did, by the names of named_modules() ("" is the root itself).
struct ConvertReport {
  struct NotConverted {
    std::string name;
    std::string reason;
  };
  std::vector<std::string> converted;
  std::vector<NotConverted> not_converted;
};

/// Makes every BatchNorm1d/2d/3d below `module`, and `module` itself, share its statistics over
/// `group` while training: in place, so that parameters, buffers, names, optimizers, hooks and
/// references to the layers stay as they are. Works wherever the layers sit (Sequential,
/// ModuleHolder members, containers of containers, inside DistributedDataParallel) since the layers
/// themselves are not replaced: from now on this process's aten::batch_norm looks its layer up.
/// Moving the module, loading a state and wrapping it keep it converted; a clone is not converted.
/// SyncBatchNorm layers below `module` stay as they are. Not thread-safe.
///
/// libtorch checks for more than one value per channel on each rank before the layer is reached: a
/// converted layer still refuses such an input, where SyncBatchNorm itself takes it.
///
/// Inside torch::nn::parallel::data_parallel, whose replicas are clones, converted layers throw
/// base::UserError. So does, while a converted layer without a weight exists, any clone of its size
/// that runs inside at::parallel_for.
///
/// @param sync_timeout as in SyncBatchNormOptions
ConvertReport convert_sync_batchnorm(
    torch::nn::Module& module, const ProcessGroupPtr& group = {},
    std::optional<std::chrono::milliseconds> sync_timeout = std::nullopt);

/// The same for a TorchScript module, whether or not it ran already: rewrites the graphs of all its
/// methods, also the check for one value per channel. Layers are all modules that call batch_norm
/// with attributes of theirs; calls with other tensors are reported. `module` then refers to the
/// rewritten module. Other handles to the old one, a module that it is a part of, and a
/// DistributedDataParallel that was made before (convert its module() instead) throw when they run
/// a converted layer in training: never is a part of them synchronised. Undo it before saving the
/// module: Python does not know the operators that are put in. Copies are not converted. What a
/// destroyed module leaves in memory, the next conversion gives back.
///
/// TorchScript's interpreter makes std::runtime_error of what a layer throws, in many lines;
/// DistributedDataParallel gives it back as it was.
ConvertReport convert_sync_batchnorm(
    torch::jit::Module& module, const ProcessGroupPtr& group = {},
    std::optional<std::chrono::milliseconds> sync_timeout = std::nullopt);

/// Undoes convert_sync_batchnorm. Of a TorchScript module for all handles to its tensors: others
/// that run code of the conversion, as a DistributedDataParallel does, throw when they train on.
/// Where a converted module is to be saved and trained on, revert and save a clone() of it.
void revert_sync_batchnorm(torch::nn::Module& module);
void revert_sync_batchnorm(torch::jit::Module& module);

}  // namespace syncbn::dist
