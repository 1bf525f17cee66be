#include <syncbn/dist/data_parallel.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "batch_norm/convert.h"
#include "batch_norm/replica_scope.h"
#include "data_parallel/module_replicas.h"
#include "device_threads/compute_threads.h"
#include "device_threads/named_error.h"
#include "torchscript/script_module.h"
#include "transport/timeouts.h"

namespace syncbn::dist::detail {
namespace {

/// Makes this thread give its next autograd node sequence number `number` or a higher one.
void advance_sequence_number(uint64_t number) {
  while (at::sequence_number::peek() < number) at::sequence_number::get_and_increment();
}

}  // namespace

DataParallelOptions DataParallelBase::checked(DataParallelOptions options) {
  if (options.device_ids.empty()) {
    const int64_t gpus = at::globalContext().hasCUDA() ? at::getNumGPUs() : 0;
    for (int64_t i = 0; i < gpus; ++i) {
      options.device_ids.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    }
    if (gpus == 0) options.device_ids.emplace_back(at::kCPU);
  }
  for (at::Device& device : options.device_ids) device = checked_device("DataParallel", device);
  for (const at::Device& device : options.device_ids) {
    if (device.type() == options.device_ids.front().type()) continue;
    throw base::UserError(
        fmt::format("DataParallel: device_ids has {} and {}; use devices of one type",
                    options.device_ids.front().str(), device.str()));
  }
  options.output_device =
      checked_device("DataParallel", options.output_device.value_or(options.device_ids.front()));
  options.sync_timeout = detail::checked(options.sync_timeout, "DataParallel: sync_timeout");
  return options;
}

DataParallelBase::DataParallelBase(std::shared_ptr<ModuleReplicas> replicas,
                                   DataParallelOptions options)
    : options_(std::move(options)),
      replicas_(std::move(replicas)),
      threads_(options_.device_ids.size() > 1
                   ? std::make_unique<ComputeThreads>("DataParallel", options_.device_ids)
                   : nullptr) {}

DataParallelBase::~DataParallelBase() = default;

std::vector<std::vector<at::Tensor>> DataParallelBase::scatter(
    const std::vector<at::Tensor>& tensors) const {
  const at::Tensor* divided = nullptr;
  int64_t size = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.dim() == 0) continue;
    if (options_.dim < -tensor.dim() || options_.dim >= tensor.dim()) {
      throw base::UserError(fmt::format("DataParallel: an input {} has no dimension {}",
                                        c10::str(tensor.sizes()), options_.dim));
    }
    if (divided != nullptr && tensor.size(options_.dim) != size) {
      throw base::UserError(fmt::format(
          "DataParallel: inputs {} and {} differ in dimension {}, along which they are divided",
          c10::str(divided->sizes()), c10::str(tensor.sizes()), options_.dim));
    }
    divided = &tensor;
    size = tensor.size(options_.dim);
  }
  const auto devices = static_cast<int64_t>(options_.device_ids.size());
  const int64_t parts = divided != nullptr ? std::clamp<int64_t>(size, 1, devices) : 1;
  std::vector<std::vector<at::Tensor>> all(static_cast<size_t>(parts));
  for (const at::Tensor& tensor : tensors) {
    const auto pieces = tensor.dim() > 0 ? tensor.tensor_split(parts, options_.dim)
                                         : std::vector<at::Tensor>(all.size(), tensor);
    for (size_t i = 0; i < all.size(); ++i) {
      const at::Device device = options_.device_ids[i];
      all[i].push_back(pieces[i].to(device, /*non_blocking=*/device.is_cuda()));
    }
  }
  return all;
}

void DataParallelBase::run(int count, const std::function<void(int replica)>& work) {
  if (!threads_) {
    replicas_->refresh();
    return work(0);
  }
  if (TapeScope::is_open()) {
    throw base::UserError(
        "DataParallel: checkpoint() around it would not know what its threads do; use it with "
        "DistributedDataParallel");
  }
  const auto claim = threads_->claim();
  replicas_->refresh();
  ReplicaTeam team(count, options_.sync_timeout);
  BatchStatisticsRecorder* const recorder = BatchStatisticsRecorder::current;
  std::mutex mutex;
  std::exception_ptr failure;  // the first
  int failed = 0;
  bool is_abandoned = false;
  // Number autograd nodes as one thread would: later layers get higher numbers in all replicas.
  const uint64_t begin = std::max(sequence_number_, at::sequence_number::peek());
  threads_->run(count, [&](int replica) {
    try {
      {
        advance_sequence_number(begin);
        const ReplicaScope scope(team, replica, replicas_->tensors(replica),
                                 replica == 0 ? recorder : nullptr);
        work(replica);
      }
      team.leave(replica);
      const std::lock_guard lock(mutex);
      sequence_number_ = std::max(sequence_number_, at::sequence_number::peek());
    } catch (const ReplicaTeam::Abandoned&) {
      const std::lock_guard lock(mutex);
      is_abandoned = true;  // another replica has failed
    } catch (...) {
      team.fail();
      const std::lock_guard lock(mutex);
      if (failure) return;
      failure = std::current_exception();
      failed = replica;
    }
  });
  advance_sequence_number(sequence_number_);
  if (!failure && is_abandoned) {
    throw base::UserError(
        "DataParallel: a layer threw in one replica, and its caller went on; let the exception "
        "pass");
  }
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const ReplicaTeam::Error& error) {
    throw ReplicaError(error.replica, error.exit_code(),
                       fmt::format("DataParallel: {}", error.what()));
  } catch (...) {
    rethrow_named([&](int exit_code, const std::string& message) {
      return ReplicaError(
          failed, exit_code,
          fmt::format("DataParallel: replica {} on {} failed: {}", failed,
                      options_.device_ids[static_cast<size_t>(failed)].str(), message));
    });
  }
}

void DataParallelBase::gather(const std::vector<ReplicaOutput>& outputs) const {
  const std::vector<at::Tensor*>& first = outputs.front().tensors;
  for (size_t i = 1; i < outputs.size(); ++i) {
    const auto& [tensors, keys] = outputs[i];
    if (tensors.size() != first.size()) {
      throw base::UserError(fmt::format(
          "DataParallel: outputs cannot be put together: replica 0 returned {}, replica {} {}",
          base::counted(std::ssize(first), "tensor"), i, tensors.size()));
    }
    if (keys != outputs.front().keys) {
      throw base::UserError(fmt::format(
          "DataParallel: outputs cannot be put together: the keys of maps are {} in replica 0, {} "
          "in replica {}; return the same in the same order, which std::unordered_map does not "
          "keep",
          base::join(outputs.front().keys, ", "), base::join(keys, ", "), i));
    }
  }
  for (size_t j = 0; j < first.size(); ++j) {
    std::vector<at::Tensor> parts;
    for (const auto& output : outputs)
      parts.push_back(output.tensors[j]->to(*options_.output_device));
    if (!threads_) {
      *first[j] = parts.front();
      continue;
    }
    const bool is_scalar = parts.front().dim() == 0;
    for (size_t i = 1; i < parts.size(); ++i) {
      at::DimVector sizes(parts[i].sizes().begin(), parts[i].sizes().end());
      const bool fits = parts[i].dim() == parts.front().dim() &&
                        parts[i].scalar_type() == parts.front().scalar_type();
      if (fits && !is_scalar) {
        const int64_t dim = c10::maybe_wrap_dim(options_.dim, parts[i].dim());
        sizes[static_cast<size_t>(dim)] = parts.front().size(dim);
      }
      if (fits && at::IntArrayRef(sizes) == parts.front().sizes()) continue;
      throw base::UserError(fmt::format(
          "DataParallel: outputs cannot be put together: tensor {} is {} of {} in replica 0, {} of "
          "{} in replica {}",
          j, c10::str(parts.front().sizes()), c10::toString(parts.front().scalar_type()),
          c10::str(parts[i].sizes()), c10::toString(parts[i].scalar_type()), i));
    }
    *first[j] = is_scalar ? at::stack(parts) : at::cat(parts, options_.dim);
  }
}

}  // namespace syncbn::dist::detail

namespace syncbn::dist {

ReplicaPlace replica_place() {
  const detail::ReplicaScope* const scope = detail::ReplicaScope::current();
  return scope == nullptr ? ReplicaPlace() : ReplicaPlace{scope->replica(), scope->team().size()};
}

using ScriptDataParallel = DataParallel<torch::jit::Module>;

ScriptDataParallel::DataParallel(const torch::jit::Module& module,
                                 const DataParallelOptions& options)
    : DataParallel(checked(options), std::make_unique<torch::jit::Module>(module)) {}

ScriptDataParallel::DataParallel(const DataParallelOptions& options,
                                 std::unique_ptr<torch::jit::Module> module)
    : DataParallelBase(std::make_shared<detail::ScriptReplicas>(*module, options.device_ids),
                       options),
      module_(std::move(module)) {}

ScriptDataParallel::~DataParallel() = default;

c10::IValue ScriptDataParallel::forward(const std::vector<c10::IValue>& inputs) {
  const auto whole = c10::ivalue::Tuple::create(inputs);
  const auto parts = scatter(detail::tensors_in(whole));
  auto& replicas = static_cast<detail::ScriptReplicas&>(this->replicas());
  std::vector<c10::IValue> outputs(parts.size());
  run(static_cast<int>(parts.size()), [&](int replica) {
    const auto index = static_cast<size_t>(replica);
    auto next = parts[index].begin();
    const c10::IValue own = detail::map_tensors(whole, [&](const at::Tensor&) { return *next++; });
    outputs[index] = detail::run_script(
        [&] { return replicas.replica(replica).forward(own.toTupleRef().elements().vec()); });
  });
  std::vector<std::vector<at::Tensor>> results(parts.size());
  std::vector<detail::ReplicaOutput> pointers(parts.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    results[i] = detail::tensors_in(outputs[i]);
    for (at::Tensor& tensor : results[i]) pointers[i].tensors.push_back(&tensor);
  }
  gather(pointers);
  auto next = results.front().begin();
  return detail::map_tensors(outputs.front(), [&](const at::Tensor&) { return *next++; });
}

void ScriptDataParallel::train(bool on) {
  module_->train(on);
}

}  // namespace syncbn::dist
