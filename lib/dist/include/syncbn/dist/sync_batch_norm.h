#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
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
void name_layers(const torch::nn::Module& module);
}  // namespace detail

/// Options of SyncBatchNorm, with the names and defaults of torch.nn.SyncBatchNorm.
struct SyncBatchNormOptions {
  SyncBatchNormOptions(int64_t num_features) : num_features_(num_features) {}  // NOLINT: as torch's

  /// C of an input of shape [N, C, ...].
  TORCH_ARG(int64_t, num_features);
  /// Added to the variance for numerical stability.
  TORCH_ARG(double, eps) = 1e-5;
  /// Weight of the new value in running_mean and running_var. nullopt: cumulative average.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Learn a scale and a shift per channel.
  TORCH_ARG(bool, affine) = true;
  /// Keep running statistics for evaluation. Without them, evaluation uses the batch's.
  TORCH_ARG(bool, track_running_stats) = true;
  /// The ranks that share statistics. Empty: all ranks, through a private group.
  TORCH_ARG(GroupOrDefault, process_group) = {};

  // Not in torch.nn.SyncBatchNorm:

  /// Share statistics within groups of this many consecutive ranks (0 … n-1, n … 2n-1, …). Must
  /// divide the number of ranks. 0: all ranks. Not together with process_group.
  TORCH_ARG(int, group_size) = 0;
  /// Upper bound on the time of an exchange, and between replicas of DataParallel on the wait for
  /// the others. Not given: the group's timeout, and DataParallelOptions::sync_timeout, which also
  /// bounds a longer one.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, sync_timeout) = std::nullopt;
  /// Apply ReLU to the result in the same pass. On CPUs the result may be changed in place. On
  /// GPUs, backward needs the result unchanged and throws otherwise, as torch.relu's does.
  TORCH_ARG(bool, fuse_relu) = false;
  /// The layer's name in messages and in the comparison between ranks. Empty: its name in the
  /// module of DistributedDataParallel or convert_sync_batchnorm(); outside both, the layer's
  /// number in the order in which the group's layers first ran.
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
/// Every rank of the group runs each forward (and its backward) the same number of times. On CPUs,
/// ranks in different layers get an error that names both layers, and the error at a timeout names
/// the missing rank. In evaluation mode, or in a group of one rank, nothing is exchanged. Works
/// without DistributedDataParallel. Gradients of gradients (create_graph=true) exchange once more
/// per order.
///
/// Unlike PyTorch's, it works on CPUs, keeps precision for small variances, and allows batches of
/// different sizes. A batch that is empty on every rank changes no buffer.
///
/// In replicas of DataParallel, the statistics are those of all replicas on all ranks. Otherwise,
/// call it from one thread at a time.
/// @throws (forward) base::UserError when WORLD_SIZE is above 1 and init_process_group was not
///   called, for an input of the wrong shape, when all ranks together have one value per channel,
///   when the ranks are in different layers, or inside torch::nn::parallel::data_parallel, whose
///   replicas are not ranks; base::UnavailableError when a peer fails.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(const SyncBatchNormOptions& options);

  /// @param residual undefined, or of the input's sizes: added to the result before ReLU
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
  friend void detail::name_layers(const torch::nn::Module& module);
  std::shared_ptr<detail::LayerName> name_;
};
TORCH_MODULE(SyncBatchNorm);

/// The result of a conversion, with the names of named_modules() ("" is the root).
struct ConvertReport {
  struct LayerReason {
    std::string name;
    std::string reason;
  };
  std::vector<std::string> converted;
  std::vector<LayerReason> not_converted;
  /// Converted layers that refuse one value per channel on a rank, and why.
  std::vector<LayerReason> refuse_one_value;
  /// SyncBatchNorm layers whose group differs from the given one; they keep theirs (see their
  /// options).
  std::vector<std::string> keep_group;
};

/// Makes every BatchNorm1d/2d/3d below `module`, and `module` itself, share its statistics over
/// `group` in training. Works in place, and wherever the layers are (Sequential, ModuleHolder
/// members, nested containers, inside DistributedDataParallel): parameters, buffers, names,
/// optimizers and hooks stay as they are, and aten::batch_norm looks up the layer that it runs for.
/// The module stays converted when it is moved, wrapped or loaded into; a clone is not converted.
/// Does not change SyncBatchNorm layers: ConvertReport::keep_group names those whose group differs.
/// Not thread-safe.
///
/// libtorch's layers refuse one value per channel on a rank before they call aten::batch_norm. This
/// function gives them, in place, the class of the drop-ins of batch_norm.h, which is derived from
/// theirs: they then accept one value per channel and print as SyncBatchNorm, whoever holds them.
/// ConvertReport::refuse_one_value names layers of other classes, which still refuse it.
///
/// Converted layers throw base::UserError inside torch::nn::parallel::data_parallel, whose replicas
/// are clones. While a converted layer without a weight exists, so does any batch-norm layer
/// without a weight and of the same size that runs inside at::parallel_for.
///
/// @param sync_timeout as in SyncBatchNormOptions
ConvertReport convert_sync_batchnorm(
    torch::nn::Module& module, const GroupOrDefault& group = {},
    std::optional<std::chrono::milliseconds> sync_timeout = std::nullopt);

/// Converts a TorchScript module, which may have run already: rewrites the graphs of all its
/// methods, including the check for one value per channel. A layer is a module that calls
/// batch_norm with its own attributes; ConvertReport::not_converted counts calls with other
/// tensors. `module` then refers to the rewritten module. Other handles to the old one, modules
/// around it, and a DistributedDataParallel made earlier (convert its module() instead) throw when
/// they run a converted layer in training. Copies are not converted. Revert before you save the
/// module: Python does not know the new operators. The next conversion frees the memory of
/// destroyed modules.
///
/// TorchScript's interpreter turns a layer's exceptions into std::runtime_error with many lines of
/// text; DistributedDataParallel and forward_converted() restore the original exception.
ConvertReport convert_sync_batchnorm(
    torch::jit::Module& module, const GroupOrDefault& group = {},
    std::optional<std::chrono::milliseconds> sync_timeout = std::nullopt);

/// Calls forward() of a module, converted or not, and throws what its layers throw.
c10::IValue forward_converted(torch::jit::Module& module, std::vector<c10::IValue> inputs);

/// Undoes convert_sync_batchnorm(): the layers behave as libtorch's again. For a TorchScript
/// module, this reverts all handles to its tensors: those that still run converted code, such as a
/// DistributedDataParallel, throw in training. To save a converted module and continue to train it,
/// revert and save a clone().
void revert_sync_batchnorm(torch::nn::Module& module);
void revert_sync_batchnorm(torch::jit::Module& module);

}  // namespace syncbn::dist
