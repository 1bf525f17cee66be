// Replaces ATen's operators on CUDA tensors: the CPU's kernels run on the same bytes, in the order
// of the stream.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "composed.h"
#include "fake_cuda.h"
#include "host_tensors.h"

namespace fake_cuda {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

bool is_cuda(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda();
}

/// Replaces each tensor of `value`, also in lists, by `change` of it.
template <class Change>
IValue map_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <class Visit>
void visit_tensors(const IValue& value, const Visit& visit) {
  map_tensors(value, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

/// Whether the operator writes to this argument, or this is a returned argument that it wrote to.
bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// One call of an operator, as the dispatcher passes it.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op),
        given_(stack.end() - static_cast<long>(op.schema().arguments().size()), stack.end()),
        device_(find_device()) {}

  at::Device device() const { return device_; }

  /// Whether the host has to know values before it can go on.
  bool needs_values() const {
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    if (!op_.hasTag(at::Tag::dynamic_output_shape)) return false;
    // Indexing has a dynamic shape only if a mask is among the indices.
    if (op_.schema().name() != "aten::index") return true;
    bool has_mask = false;
    for (const std::optional<Tensor>& index : given_[1].toOptionalTensorVector()) {
      if (!index || !index->defined()) continue;
      has_mask |= index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    }
    return has_mask;
  }

  /// Runs the operator on tensors that only have the arguments' shapes. @return the results, and
  /// the arguments, which the operator may have resized
  std::pair<Stack, Stack> infer() const {
    static auto* const mutex = new std::mutex;
    // With Python, batch norm has a Meta kernel that returns statistics also in evaluation, where
    // the CPU's returns none.
    static auto* const without_meta =
        new std::unordered_set<std::string>{"aten::native_batch_norm"};
    const std::string name = c10::toString(op_.operator_name());
    const auto knows_meta = [&] {
      const std::lock_guard lock(*mutex);
      return !without_meta->contains(name);
    };
    if (knows_meta()) {
      try {
        return run_on_shapes(DispatchKey::Meta);
      } catch (const c10::Error&) {
        // Either there is no Meta kernel, or the arguments are wrong; the next line throws the
        // latter.
      }
    }
    auto inferred = run_on_shapes(DispatchKey::CPU);
    const std::lock_guard lock(*mutex);
    without_meta->insert(name);
    return inferred;
  }

  /// The arguments, with CPU tensors over the bytes of CUDA tensors.
  Stack on_host() const {
    Stack arguments;
    for (const IValue& value : given_) {
      if (value.isDevice()) {
        arguments.emplace_back(at::Device(at::kCPU));
      } else {
        arguments.push_back(map_tensors(value, host_tensor));
      }
    }
    return arguments;
  }

  /// Gives the tensors that the operator writes to the sizes of `sized`, as for an out= argument.
  void resize_written(const Stack& sized) const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!is_written(arguments[i])) continue;
      const auto from = tensors_of(sized[i]);
      const auto to = tensors_of(given_[i]);
      for (size_t k = 0; k < to.size(); ++k) resize_like(to[k], from[k]);
    }
  }

  /// The call's results: the arguments that it writes to, and new tensors like those in `results`.
  Stack returned(const Stack& results) const {
    const auto& schema = op_.schema();
    Stack all;
    for (size_t i = 0; i < results.size(); ++i) {
      const c10::Argument& info = schema.returns()[i];
      all.push_back(is_written(info) ? written_argument(info)
                                     : map_tensors(results[i], [&](const Tensor& like) {
                                         return like.defined() ? empty_like(like) : like;
                                       }));
    }
    return all;
  }

  /// The state of the CUDA generator, if the operator draws random numbers.
  std::optional<at::PhiloxCudaState> random_state() const {
    const auto index = generator_index();
    if (!index) return std::nullopt;
    const at::Generator generator =
        given_[*index].isGenerator() ? given_[*index].toGenerator()
                                     : at::cuda::detail::getDefaultCUDAGenerator(device_.index());
    TORCH_CHECK(generator.device().is_cuda(), "a fake CUDA device needs a CUDA generator");
    auto* const state = at::check_generator<at::CUDAGeneratorImpl>(generator);
    const std::lock_guard lock(state->mutex_);
    constexpr uint64_t kIncrement = 4;  // Philox generates four numbers at once
    return state->philox_cuda_state(kIncrement);
  }

  std::optional<size_t> generator_index() const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "generator") return i;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(!op_.hasTag(at::Tag::nondeterministic_seeded),
                                "fake_cuda: ", op_.schema().name(), " takes no generator");
    return std::nullopt;
  }

  static std::vector<Tensor> tensors_of(const IValue& value) {
    std::vector<Tensor> tensors;
    visit_tensors(value, [&](const Tensor& tensor) { tensors.push_back(tensor); });
    return tensors;
  }

 private:
  at::Device find_device() const {
    std::optional<at::Device> device;
    for (const IValue& value : given_) {
      visit_tensors(value, [&](const Tensor& tensor) {
        if (is_cuda(tensor) && !device) device = tensor.device();
      });
      if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
    }
    const bool is_complete = device && device->has_index();
    return is_complete ? *device : at::Device(at::kCUDA, c10::cuda::current_device());
  }

  /// @param key Meta, or CPU for operators without a Meta kernel
  std::pair<Stack, Stack> run_on_shapes(DispatchKey key) const {
    const at::Device where(key == DispatchKey::Meta ? at::kMeta : at::kCPU);
    Stack arguments;
    for (const IValue& value : given_) {
      if (value.isDevice()) {
        arguments.emplace_back(where);
      } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
        arguments.emplace_back();
      } else {
        arguments.push_back(map_tensors(value, [&](const Tensor& like) {
          if (!like.defined()) return like;
          Tensor shape = at::empty_strided(like.sizes(), like.strides(),
                                           at::TensorOptions(like.scalar_type()).device(where));
          if (where.is_cpu()) shape.zero_();
          if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
            shape.unsafeGetTensorImpl()->set_wrapped_number(true);
          }
          return shape;
        }));
      }
    }
    Stack results = arguments;
    const at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(&results);
    return {results, arguments};
  }

  IValue written_argument(const c10::Argument& returned) const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (is_written(arguments[i]) &&
          arguments[i].alias_info()->beforeSets() == returned.alias_info()->beforeSets()) {
        return given_[i];
      }
    }
    TORCH_INTERNAL_ASSERT(false, "an operator returns an argument that it does not have");
  }

  Tensor empty_like(const Tensor& like) const {
    return at::empty_strided(like.sizes(), like.strides(),
                             at::TensorOptions(like.scalar_type()).device(device_));
  }

  static void resize_like(const Tensor& tensor, const Tensor& like) {
    if (!tensor.defined() || tensor.sizes() == like.sizes()) return;
    tensor.resize_(like.sizes());
    if (like.numel() > 0) tensor.as_strided_(like.sizes(), like.strides());
  }

  const c10::OperatorHandle& op_;
  const Stack given_;
  const at::Device device_;
};

/// A CPU generator with a seed that depends on the state of a CUDA generator.
at::Generator host_generator(const at::PhiloxCudaState& state) {
  constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15ULL;
  return at::detail::createCPUGenerator(state.seed_.val ^ (state.offset_.val * kGoldenRatio));
}

/// Runs the operator on the CPU. @return its results
Stack run_on_host(const c10::OperatorHandle& op, Stack arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(&arguments);
  return arguments;
}

void copy_results(const Stack& from, const Stack& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    const auto sources = Call::tensors_of(from[i]);
    const auto targets = Call::tensors_of(to[i]);
    for (size_t k = 0; k < targets.size(); ++k) {
      if (!targets[k].defined()) continue;
      const at::AutoDispatchBelowADInplaceOrView below;
      targets[k].copy_(sources[k]);
    }
  }
}

/// The new tensors of `returned` as host tensors; nothing for the others.
Stack new_on_host(const c10::OperatorHandle& op, const Stack& returned) {
  Stack all;
  for (size_t i = 0; i < returned.size(); ++i) {
    const bool is_new = !is_written(op.schema().returns()[i]);
    all.push_back(is_new ? map_tensors(returned[i], host_tensor) : IValue());
  }
  return all;
}

void run_at_once(const c10::OperatorHandle& op, const Call& call, Stack* stack) {
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device().index());
  c10::cuda::stream_synchronize(stream);  // warns or throws if torch's sync debug mode says so
  const Stack arguments = call.on_host();
  const Stack results = run_on_host(op, arguments);
  call.resize_written(arguments);
  const Stack written = call.on_host();
  for (size_t i = 0; i < written.size(); ++i) {
    if (is_written(op.schema().arguments()[i])) copy_results({arguments[i]}, {written[i]});
  }
  Stack returned = call.returned(results);
  copy_results(results, new_on_host(op, returned));
  for (size_t i = 0; i < results.size(); ++i) {
    if (call.tensors_of(results[i]).empty()) returned[i] = results[i];  // a number
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), returned.begin(), returned.end());
}

void run_later(const c10::OperatorHandle& op, const Call& call, Stack* stack) {
  const auto [shapes, sized] = call.infer();
  call.resize_written(sized);
  Stack returned = call.returned(shapes);
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device().index());
  const Stack results = new_on_host(op, returned);
  if (lags()) poison(results, stream);
  C10_CUDA_CHECK(enqueue(stream, [op, arguments = call.on_host(), results,
                                  random = call.random_state(), index = call.generator_index()] {
    Stack given = arguments;
    if (random) given[*index] = host_generator(*random);
    copy_results(run_on_host(op, std::move(given)), results);
  }));
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), returned.begin(), returned.end());
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const Call call(op, *stack);
  const c10::cuda::CUDAGuard guard(call.device());
  count(Count::kOperators);
  if (call.needs_values()) {
    run_at_once(op, call, stack);
  } else {
    run_later(op, call, stack);
  }
}

/// libtorch performs the copies of the copy engine, with its waits and staging; copies that a
/// kernel performs are operators like others.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  const bool is_plain = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
                        to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
                        to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  if (is_plain || !to.is_cuda() || !from.is_cuda()) {
    return at::native::copy_(to, from, non_blocking);
  }
  if (to.device() == from.device()) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    Stack stack{to, from, non_blocking};
    run_operator(op, &stack);
    return to;
  }
  const Tensor same_type = from.to(to.scalar_type()).expand_as(to).contiguous();
  const Tensor moved = at::empty_like(same_type, same_type.options().device(to.device()));
  at::native::copy_(const_cast<Tensor&>(moved), same_type, non_blocking);
  return to.copy_(moved, non_blocking);
}

/// Operators whose CUDA kernels launch nothing by themselves.
const std::set<std::string>& kept() {
  static const std::set<std::string> names{
      "empty",         "empty_strided",      "resize_",     "set_",
      "record_stream", "is_pinned",          "_pin_memory", "_efficientzerotensor",
      "as_strided",    "as_strided_",        "view",        "_reshape_alias",
      "unfold",        "_local_scalar_dense"};
  return names;
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& returned : schema.returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) return true;
  }
  return false;
}

struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

const bool is_registered = [] {
  // It would warn for each replaced kernel.
  NoWarnings no_warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__,
                                __LINE__);
  const std::set<std::string> composed = register_composed(library);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const std::string short_name = name.name.substr(6);
    if (kept().contains(short_name) || composed.contains(short_name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(DispatchKey::CUDA) || returns_a_view(op->schema())) {
      continue;
    }
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  // These have no CUDA kernel that could be replaced.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  library.impl("copy_", copy_);
  // There is no cuDNN, and no NVRTC for fused kernels.
  at::globalContext().setUserEnabledCuDNN(false);
  torch::jit::overrideCanFuseOnGPU(false);
  torch::jit::setTensorExprFuserEnabled(false);
  return true;
}();

}  // namespace
}  // namespace fake_cuda
