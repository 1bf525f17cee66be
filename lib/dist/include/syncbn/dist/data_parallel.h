#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <syncbn/base/error.h>
#include <syncbn/dist/tensor_tree.h>

namespace torch::jit {
struct Module;
}

namespace syncbn::dist {

/// Options of DataParallel, with the names of torch.nn.DataParallel.
struct DataParallelOptions {
  /// One for each replica; the module is on the first. The CPU may be given several times: its
  /// replicas share parameters in memory, and divide at::get_num_threads() between them. Empty: all
  /// CUDA devices, or the CPU alone.
  std::vector<at::Device> device_ids = {};
  /// Where forward's result is; unset: on the first device.
  std::optional<at::Device> output_device = std::nullopt;
  /// The dimension along which inputs are divided and outputs are put together.
  int64_t dim = 0;
  /// How long a replica waits for the others in a layer that shares statistics. A shorter
  /// sync_timeout of the layer applies there.
  std::chrono::milliseconds sync_timeout{15000};
};

/// A replica of DataParallel failed, with the message of its exception and its exit code.
class ReplicaError : public base::Error {
 public:
  ReplicaError(int replica, int exit_code, const std::string& message)
      : Error(message, exit_code), replica_(replica) {}

  int replica() const noexcept { return replica_; }

 private:
  int replica_;
};

/// A replica's index, and the number of replicas among which forward() divides the batch.
struct ReplicaPlace {
  int replica = 0;
  int replicas = 1;
};
/// The replica that this thread runs; {0, 1} outside DataParallel. Its part of a batch is element
/// `replica` of tensor_split(replicas, dim).
ReplicaPlace replica_place();

namespace detail {

class ComputeThreads;
class ModuleReplicas;

/// What a replica returned: the tensors, and the keys of the maps that hold them.
struct ReplicaOutput {
  std::vector<at::Tensor*> tensors;
  std::vector<std::string> keys;

  /// For for_each_tensor().
  struct Collector {
    ReplicaOutput& output;

    void operator()(at::Tensor& tensor) const { output.tensors.push_back(&tensor); }
    template <class Key>
    void key(const Key& key) const {
      if constexpr (std::is_arithmetic_v<Key>) {
        output.keys.push_back(std::to_string(key));
      } else if constexpr (std::is_convertible_v<const Key&, std::string>) {
        output.keys.push_back(key);
      }
    }
  };
};

/// The compiled part of DataParallel, which does not depend on the module's type.
class DataParallelBase {
 public:
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  const DataParallelOptions& options() const { return options_; }

 protected:
  DataParallelBase(std::shared_ptr<ModuleReplicas> replicas, DataParallelOptions options);
  ~DataParallelBase();

  /// Fills in the default devices. @throws base::UserError for a device that does not exist,
  /// devices of several types, or a sync_timeout that is not above zero
  static DataParallelOptions checked(DataParallelOptions options);

  /// The parts of each tensor, by replica, for the replicas that get a part; for one replica if
  /// there are no tensors to divide.
  std::vector<std::vector<at::Tensor>> scatter(const std::vector<at::Tensor>& tensors) const;
  /// Calls work(replica) on the thread of each of the first `count` replicas.
  void run(int count, const std::function<void(int replica)>& work);
  /// Concatenates the tensors of the replicas' outputs, and stores the results in the first output.
  /// @throws base::UserError if they do not match
  void gather(const std::vector<ReplicaOutput>& outputs) const;

  ModuleReplicas& replicas() { return *replicas_; }

 private:
  const DataParallelOptions options_;
  const std::shared_ptr<ModuleReplicas> replicas_;
  const std::unique_ptr<ComputeThreads> threads_;
  uint64_t sequence_number_ = 0;  ///< autograd's sequence number after the last forward
};

std::shared_ptr<ModuleReplicas> replicate(std::shared_ptr<torch::nn::Module> module,
                                          const std::vector<at::Device>& devices);
std::shared_ptr<ModuleReplicas> replicate(std::vector<std::shared_ptr<torch::nn::Module>> replicas,
                                          const std::vector<at::Device>& devices);
torch::nn::Module& replica_of(ModuleReplicas& replicas, int replica);

}  // namespace detail

/// Divides each batch among replicas of a module in one process, each with a thread and a device
/// (twin of torch.nn.DataParallel).
///
///     DataParallel<NetImpl> dp(net, {.device_ids = {at::kCPU, at::kCPU}});
///     auto loss = criterion(dp(images), labels);
///     loss.backward();                      // net's gradients are those of the whole batch
///
/// forward() divides the tensors among its arguments, also inside containers, along
/// `dim`, as evenly as possible; tensors without dimensions and other arguments go to each replica.
/// A batch with fewer samples than devices uses one replica per sample. The results are
/// concatenated along `dim`; tensors without dimensions, such as losses, become a vector with one
/// value per replica. Results that hold no tensor are the first replica's. With one device the
/// module runs as it is.
///
/// Replica 0 is the module itself, and the others are clones. If the module cannot be cloned
/// (torch::nn::Module::clone() throws unless a class overrides it) or the clone is of another
/// class, the module runs in all threads at once, and ATen's operators get the replica's tensors in
/// place of the module's. Its forward() must not assign to members; on GPUs it takes devices from
/// its inputs, and passes parameters to operators only, not to autograd functions of its own, nor
/// their data() or data_ptr(). Replicas read the module's parameters, and all gradients accumulate
/// in the module's parameters. Before each forward they get copies of its buffers; their changes to
/// these are lost. Parameters and buffers may be changed in place (optimizers, to(), loading), and
/// so may requires_grad. Clones follow the module's train() and eval().
///
/// SyncBatchNorm layers, and layers that convert_sync_batchnorm() converts (before or after), use
/// the statistics of all replicas, merged exactly, in forward and backward. With a process group of
/// several ranks, these are the statistics of all replicas on all ranks. Other batch norm layers
/// use their own replica's. With DistributedDataParallel around the module:
///
///     DistributedDataParallel<NetImpl> ddp(net);
///     auto scores = ddp.invoke([&](NetImpl&, auto& images) { return dp(images); }, images);
///
/// Not thread-safe. Do not fork while it lives.
/// @throws base::UserError (constructor) when a device is not there; (forward) when the module is
///   not on the first device, tensors to divide have different sizes, or outputs do not match;
///   ReplicaError when a replica throws, or does not reach a layer in which the others wait.
template <class Module>
class DataParallel : public detail::DataParallelBase {
 public:
  explicit DataParallel(std::shared_ptr<Module> module, const DataParallelOptions& options = {})
      : DataParallel(checked(options), std::move(module)) {}
  explicit DataParallel(const torch::nn::ModuleHolder<Module>& module,
                        const DataParallelOptions& options = {})
      : DataParallel(module.is_empty() ? nullptr : module.ptr(), options) {}
  /// The module, and for each further device a module of the same structure, which is moved there.
  explicit DataParallel(const std::vector<std::shared_ptr<Module>>& replicas,
                        const DataParallelOptions& options = {})
      : DataParallel(checked(options), replicas) {}

  template <class... Args>
  auto forward(Args&&... args) {
    return invoke(
        [](Module& module, auto&&... inputs) {
          return module.forward(std::forward<decltype(inputs)>(inputs)...);
        },
        std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// forward() through another function of the module: `dp.invoke(&NetImpl::logits, images)`.
  template <class Function, class... Args>
  auto invoke(const Function& function, const Args&... args) {
    using Inputs = std::tuple<std::decay_t<const Args&>...>;
    using Output =
        std::decay_t<std::invoke_result_t<Function, Module&, std::decay_t<const Args&>&...>>;
    Inputs whole(args...);
    std::vector<at::Tensor> tensors;
    detail::for_each_tensor(whole, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
    const auto parts = scatter(tensors);
    std::vector<Inputs> inputs;
    for (const auto& part : parts) {
      auto next = part.begin();
      detail::for_each_tensor(inputs.emplace_back(whole),
                              [&](at::Tensor& tensor) { tensor = *next++; });
    }
    std::vector<std::optional<Output>> outputs(inputs.size());
    run(static_cast<int>(inputs.size()), [&](int replica) {
      const auto index = static_cast<size_t>(replica);
      auto& module = static_cast<Module&>(detail::replica_of(replicas(), replica));
      outputs[index] = std::apply(
          [&](auto&... own) { return std::invoke(function, module, own...); }, inputs[index]);
    });
    std::vector<detail::ReplicaOutput> results(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      detail::for_each_tensor(*outputs[i], detail::ReplicaOutput::Collector{results[i]});
    }
    gather(results);
    return std::move(*outputs.front());
  }

  Module& module() { return *module_; }
  const std::shared_ptr<Module>& module_ptr() const { return module_; }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

 private:
  DataParallel(const DataParallelOptions& options, std::shared_ptr<Module> module)
      : DataParallelBase(detail::replicate(module, options.device_ids), options),
        module_(std::move(module)) {}
  DataParallel(const DataParallelOptions& options,
               const std::vector<std::shared_ptr<Module>>& replicas)
      : DataParallelBase(detail::replicate({replicas.begin(), replicas.end()}, options.device_ids),
                         options),
        module_(replicas.front()) {}

  std::shared_ptr<Module> module_;
};

/// DataParallel for a TorchScript module. It also divides and concatenates tensors inside lists,
/// tuples and dictionaries.
template <>
class DataParallel<torch::jit::Module> : public detail::DataParallelBase {
 public:
  explicit DataParallel(const torch::jit::Module& module, const DataParallelOptions& options = {});
  ~DataParallel();

  c10::IValue forward(const std::vector<c10::IValue>& inputs);
  template <class... Args>
  c10::IValue operator()(Args&&... args) {
    std::vector<c10::IValue> inputs;
    (inputs.emplace_back(std::forward<Args>(args)), ...);
    return forward(inputs);
  }

  torch::jit::Module& module() { return *module_; }
  void train(bool on = true);
  void eval() { train(false); }

 private:
  DataParallel(const DataParallelOptions& options, std::unique_ptr<torch::jit::Module> module);
  std::unique_ptr<torch::jit::Module> module_;
};

}  // namespace syncbn::dist
