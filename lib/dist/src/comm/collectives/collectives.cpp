#include <syncbn/dist/collectives.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include "collectives/gather_rows.h"
#include "collectives/started_work.h"
#include "groups/world.h"
#include "monitor/flight_recorder.h"
#include "transport/timeouts.h"

namespace syncbn::dist {
namespace {

using at::Tensor;
using detail::Outcome;
using detail::Started;
using Tensors = std::vector<Tensor>;

/// The dtypes that Gloo can send and reduce. Others are sent as bytes.
bool gloo_knows(at::ScalarType type) {
  constexpr std::array kTypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                              at::kChar,  at::kByte,   at::kInt,  at::kLong};
  return std::ranges::count(kTypes, type) != 0;
}

/// A contiguous tensor with the same values: `tensor` itself if possible.
Tensor dense(const Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

/// The same memory, flat and of a dtype that Gloo can send.
Tensor sendable(const Tensor& dense) {
  const Tensor flat = dense.view(-1);
  return dense.is_cpu() && !gloo_knows(dense.scalar_type()) ? flat.view(at::kByte) : flat;
}

/// Checks the arguments of a call, and names the call in errors.
class CheckedCall {
 public:
  CheckedCall(const char* name, const GroupOrDefault& group, Timeout timeout)
      : name_(name), group_(group.get()), timeout_(timeout) {
    if (timeout && timeout->count() <= 0) {
      refuse(fmt::format("its timeout of {} ms is not above 0", timeout->count()));
    }
    if (timeout_) timeout_ = detail::bounded(*timeout_);
  }

  c10d::ProcessGroup& group() const { return *group_; }
  const ProcessGroupPtr& group_ptr() const { return group_; }
  int size() const { return group_->getSize(); }
  bool is_root(int root) const { return group_->getRank() == root; }

  /// "all_reduce on rank 0 of 2 of group '0'".
  std::string describe() const {
    return fmt::format("{} on rank {} of {} of group '{}'", name_, group_->getRank(), size(),
                       group_->getGroupName());
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw base::UserError(fmt::format("{} was refused: {}", describe(), why));
  }

  template <class Options>
  Options options() const {
    return detail::with_timeout<Options>(timeout_);
  }

  const char* name() const { return name_; }
  Timeout timeout() const { return timeout_; }

  void require_rank(const char* role, int rank) const {
    if (rank >= 0 && rank < size()) return;
    refuse(
        fmt::format("{} {} is outside the group of {}", role, rank, base::counted(size(), "rank")));
  }

  void require_peer(const char* role, int rank, int tag) const {
    require_rank(role, rank);
    if (is_root(rank)) refuse(fmt::format("the {} is this rank itself", role));
    if (tag < 0) refuse(fmt::format("the tag {} is negative", tag));
  }

  void require_dense(const Tensor& tensor) const {
    if (!tensor.defined()) refuse("the tensor is undefined");
    if (tensor.layout() != at::kStrided) refuse("the tensor is sparse; make it dense first");
    if (tensor.is_quantized()) refuse("the tensor is quantized; dequantize it first");
    if (!tensor.is_cpu() && !tensor.is_cuda()) {
      refuse(
          fmt::format("the tensor is on {}; move it to the CPU or a GPU", tensor.device().str()));
    }
  }

  void require_output(const Tensor& tensor) const {
    require_dense(tensor);
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      refuse("elements of the tensor share memory, as after expand(); clone it first");
    }
  }

  void require_like(const Tensor& tensor, const Tensor& other) const {
    if (tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device()) return;
    refuse(fmt::format("a tensor of {} on {} is given together with one of {} on {}",
                       c10::toString(tensor.scalar_type()), tensor.device().str(),
                       c10::toString(other.scalar_type()), other.device().str()));
  }

  /// One tensor per rank, all with the same dtype and device.
  void require_list(const char* role, const Tensors& list) const {
    require_length(role, list.size());
    for (const Tensor& one : list) {
      require_dense(one);
      require_like(one, list.front());
    }
  }

  void require_length(const char* role, size_t length) const {
    if (length == static_cast<size_t>(size())) return;
    refuse(fmt::format("{} has length {}, and the group has {}: it needs one entry for each", role,
                       length, base::counted(size(), "rank")));
  }

  /// One tensor per rank, each with the sizes of `whole`.
  void require_parts_of(const Tensor& whole, const char* role, const Tensors& parts) const {
    require_list(role, parts);
    require_like(parts.front(), whole);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      if (parts[rank].sizes() == whole.sizes()) continue;
      refuse(fmt::format("{}[{}] has the sizes {}, and this rank's tensor {}", role, rank,
                         c10::str(parts[rank].sizes()), c10::str(whole.sizes())));
    }
  }

  /// `whole` has the elements of one `part` per rank.
  void require_whole(const char* whole_role, const Tensor& whole, const char* part_role,
                     const Tensor& part) const {
    if (whole.numel() == part.numel() * size()) return;
    refuse(fmt::format("the {} has {}, and needs {} times the {} of the {}", whole_role,
                       base::counted(whole.numel(), "element"), size(), part.numel(), part_role));
  }

  /// @param splits the rows of `tensor` for each rank; empty: equal splits.
  void require_splits(const char* role, const std::vector<int64_t>& splits,
                      const Tensor& tensor) const {
    if (tensor.dim() == 0) refuse(fmt::format("the {} tensor has no first dimension", role));
    const int64_t rows = tensor.size(0);
    if (splits.empty()) {
      if (rows % size() == 0) return;
      refuse(fmt::format("the {} tensor's {} cannot be split evenly among {}", role,
                         base::counted(rows, "row"), base::counted(size(), "rank")));
    }
    require_length(fmt::format("{}_split_sizes", role).c_str(), splits.size());
    for (const int64_t split : splits) {
      if (split < 0) refuse(fmt::format("{}_split_sizes has {}", role, split));
    }
    const int64_t total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    if (total == rows) return;
    refuse(fmt::format("{}_split_sizes add up to {}, and the tensor has {}", role, total,
                       base::counted(rows, "row")));
  }

 private:
  const char* name_;
  ProcessGroupPtr group_;
  Timeout timeout_;
};

enum class Kind {
  kOneCollective,
  kSeveralCollectives,  ///< each needs the result of the one before
  kTransfer,            ///< send or recv
};

/// A call with valid arguments. The blocking form of a function passes it to complete(), the
/// asynchronous form to launch().
struct Plan {
  CheckedCall call;
  Kind kind;
  std::function<Started()> start;  ///< starts the call; called once
};

/// The blocking form.
Outcome complete(const Plan& plan) {
  Outcome outcome;
  detail::complete(plan.start(), std::nullopt, outcome);
  return outcome;
}

/// The asynchronous form. The group's StartQueue starts a call of several collectives, and the
/// calls after it while the queue is busy. So collectives start in the same order on all ranks,
/// whichever form each rank uses.
WorkPtr launch(Plan plan) {
  auto work = std::make_shared<detail::StartedWork>(plan.call.describe());
  detail::Backend* const backend = detail::backend_of(plan.call.group_ptr());
  const bool starts_here = backend == nullptr || plan.kind == Kind::kTransfer ||
                           (plan.kind == Kind::kOneCollective && backend->start_queue().is_idle());
  if (starts_here) {
    try {
      work->start(plan.start());
    } catch (const base::UnavailableError&) {
      // wait() reports a rank that has already ended, like one that ends later.
      work->fail(std::current_exception());
    }
    return work;
  }
  backend->start_queue().push([work, plan = std::move(plan)] {
    try {
      work->start(plan.start());
    } catch (...) {
      work->fail(std::current_exception());
    }
  });
  return work;
}

/// A tensor of any strides that a collective overwrites. The collective works on `buffers`.
struct Target {
  /// @param to_buffer returns a view of the contiguous values.
  template <class ToBuffer = Tensor(const Tensor&)>
  explicit Target(const Tensor& tensor, const ToBuffer& to_buffer = sendable)
      : data(tensor.detach()), values(dense(data)), buffers{to_buffer(values)} {}

  /// If `buffers` are copies, the result is copied to the tensor after the work. The work's
  /// transport keeps `buffers`. Called once.
  Started started(c10::intrusive_ptr<c10d::Work> work) {
    if (values.is_alias_of(data)) return {.work = std::move(work)};
    return {.work = std::move(work),
            .finish = [data = std::move(data), values = std::move(values)](Outcome&) {
              data.copy_(values);
            }};
  }

  Tensor data;
  Tensor values;
  Tensors buffers;
};

/// A reduction, expressed in operations and dtypes that Gloo can reduce.
struct Reduction {
  Reduction(const CheckedCall& call, const Tensor& tensor, c10d::ReduceOp wanted)
      : op(std::move(wanted)), type(tensor.scalar_type()) {
    require_fit(call, tensor);
    if (!tensor.is_cpu() || gloo_knows(type)) return;
    if (type == at::kBool) {
      if (op.op_ == c10d::ReduceOp::SUM) op = c10d::ReduceOp::MAX;
      if (op.op_ == c10d::ReduceOp::PRODUCT) op = c10d::ReduceOp::MIN;
      return;
    }
    const bool can_sum = at::isComplexType(type) && type != at::kComplexHalf;
    if (can_sum && op.op_ == c10d::ReduceOp::SUM) return;
    call.refuse(fmt::format("Gloo cannot reduce {}{}; convert the tensor first",
                            c10::toString(type), can_sum ? " other than by SUM" : ""));
  }

  /// A view of the values in a dtype that the backend can reduce.
  Tensor operator()(const Tensor& dense) const {
    if (dense.is_cpu() && at::isComplexType(type)) return at::view_as_real(dense).view(-1);
    return sendable(dense);
  }

  c10d::ReduceOp op;
  at::ScalarType type;

 private:
  void require_fit(const CheckedCall& call, const Tensor& tensor) const {
    const auto kind = op.op_;
    const bool bitwise =
        kind == c10d::ReduceOp::BAND || kind == c10d::ReduceOp::BOR || kind == c10d::ReduceOp::BXOR;
    const bool is_float = at::isFloatingType(type) || at::isComplexType(type);
    if (bitwise && is_float) {
      call.refuse(fmt::format("a bitwise operation cannot reduce {}", c10::toString(type)));
    }
    if (kind == c10d::ReduceOp::AVG && !is_float) {
      call.refuse(fmt::format("AVG cannot reduce {}; sum and divide", c10::toString(type)));
    }
    if (kind == c10d::ReduceOp::UNUSED || (kind == c10d::ReduceOp::PREMUL_SUM && tensor.is_cpu())) {
      call.refuse("the operation is not one for tensors on the CPU");
    }
  }
};

Tensor flat_cat(const Tensors& tensors) {
  Tensors flat;
  for (const Tensor& one : tensors) flat.push_back(dense(one).view(-1));
  return at::cat(flat);
}

std::vector<int64_t> element_counts(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const Tensor& one : tensors) counts.push_back(one.numel());
  return counts;
}

Tensor size_of(const std::string& bytes) {
  return at::scalar_tensor(static_cast<int64_t>(bytes.size()), at::kLong);
}

/// Padded with zeros to `size`.
Tensor to_tensor(const std::string& bytes, int64_t size) {
  Tensor tensor = at::zeros({size}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string to_bytes(const Tensor& tensor, int64_t size) {
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<size_t>(size)};
}

/// When the caller of all_gather waits.
enum class Waits { kNow, kLater };

Plan plan_all_reduce(const Tensor& tensor, c10d::ReduceOp op, const GroupOrDefault& group,
                     Timeout timeout) {
  const CheckedCall call("all_reduce", group, timeout);
  call.require_output(tensor);
  const Reduction reduction(call, tensor, std::move(op));
  auto options = call.options<c10d::AllreduceOptions>();
  options.reduceOp = reduction.op;
  return Plan{call, Kind::kOneCollective,
              [call, options, target = Target(tensor, reduction)]() mutable {
                return target.started(call.group().allreduce(target.buffers, options));
              }};
}

Plan plan_reduce(const Tensor& tensor, int root, c10d::ReduceOp op, const GroupOrDefault& group,
                 Timeout timeout) {
  const CheckedCall call("reduce", group, timeout);
  call.require_rank("root", root);
  call.require_output(tensor);
  const Reduction reduction(call, tensor, std::move(op));
  // A copy, because backends leave partial sums on the other ranks.
  const Tensor values = dense(tensor).clone();
  auto options = call.options<c10d::ReduceOptions>();
  options.reduceOp = reduction.op;
  options.rootRank = root;
  return Plan{call, Kind::kOneCollective, [=, output = tensor.detach()] {
                Tensors buffers{reduction(values)};
                auto work = call.group().reduce(buffers, options);
                return Started{.work = std::move(work), .finish = [=](Outcome&) {
                                 if (call.is_root(root)) output.copy_(values);
                               }};
              }};
}

Plan plan_broadcast(const Tensor& tensor, int root, const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("broadcast", group, timeout);
  call.require_rank("root", root);
  call.require_output(tensor);
  auto options = call.options<c10d::BroadcastOptions>();
  options.rootRank = root;
  return Plan{call, Kind::kOneCollective, [call, options, target = Target(tensor)]() mutable {
                return target.started(call.group().broadcast(target.buffers, options));
              }};
}

/// Both forms of all_gather exchange the same messages, so that ranks may mix them.
Plan plan_all_gather(const Tensor& tensor, const GroupOrDefault& group, Timeout timeout,
                     Waits waits) {
  const CheckedCall call("all_gather", group, timeout);
  call.require_dense(tensor);
  const Tensor row = sendable(dense(tensor)).unsqueeze(0);
  return Plan{call, Kind::kOneCollective,
              [=, sizes = tensor.sizes().vec(), type = tensor.scalar_type()] {
                const detail::NamedAs named(call.name(), sizes);
                const Tensor all = at::empty({call.size(), row.size(1)}, row.options());
                auto work = detail::start_gather_rows(row, all, call.group_ptr(), call.timeout(),
                                                      waits == Waits::kNow);
                return Started{.work = std::move(work), .finish = [=](Outcome& outcome) {
                                 for (const Tensor& one : all.unbind()) {
                                   outcome.tensors.push_back(one.view(type).view(sizes));
                                 }
                               }};
              }};
}

Plan plan_all_gather_into_tensor(const Tensor& output, const Tensor& input,
                                 const GroupOrDefault& group, Timeout timeout, Waits waits) {
  const CheckedCall call("all_gather_into_tensor", group, timeout);
  call.require_dense(input);
  call.require_output(output);
  call.require_like(output, input);
  call.require_whole("output", output, "input", input);
  const Tensor row = sendable(dense(input)).unsqueeze(0);
  return Plan{call, Kind::kOneCollective,
              [=, sizes = input.sizes().vec(), target = Target(output)]() mutable {
                const detail::NamedAs named(call.name(), sizes);
                const Tensor all = target.buffers[0].view({call.size(), row.size(1)});
                return target.started(detail::start_gather_rows(
                    row, all, call.group_ptr(), call.timeout(), waits == Waits::kNow));
              }};
}

Plan plan_gather(const Tensor& tensor, int root, const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("gather", group, timeout);
  call.require_rank("root", root);
  call.require_dense(tensor);
  auto options = call.options<c10d::GatherOptions>();
  options.rootRank = root;
  return Plan{call, Kind::kOneCollective, [=, input = dense(tensor)] {
                Tensors buffers{sendable(input)};
                Tensors outputs;
                std::vector<Tensors> received;
                if (call.is_root(root)) {
                  received.emplace_back();
                  for (int rank = 0; rank < call.size(); ++rank) {
                    outputs.push_back(at::empty(input.sizes(), input.options()));
                    received[0].push_back(sendable(outputs.back()));
                  }
                }
                auto work = call.group().gather(received, buffers, options);
                return Started{.work = std::move(work), .finish = [outputs](Outcome& outcome) {
                                 outcome.tensors = outputs;
                               }};
              }};
}

Plan plan_scatter(const Tensor& tensor, const Tensors& parts, int root, const GroupOrDefault& group,
                  Timeout timeout) {
  const CheckedCall call("scatter", group, timeout);
  call.require_rank("root", root);
  call.require_output(tensor);
  std::vector<Tensors> sent;
  if (call.is_root(root)) {
    call.require_parts_of(tensor, "parts", parts);
    sent.emplace_back();
    for (const Tensor& one : parts) sent[0].push_back(sendable(dense(one)));
  } else if (!parts.empty()) {
    call.refuse(fmt::format("it is given parts, and rank {} is the one that has them", root));
  }
  auto options = call.options<c10d::ScatterOptions>();
  options.rootRank = root;
  return Plan{call, Kind::kOneCollective, [=, target = Target(tensor)]() mutable {
                return target.started(call.group().scatter(target.buffers, sent, options));
              }};
}

/// @param input all ranks' parts, in the order of ranks; contiguous.
Plan plan_reduce_scatter(const CheckedCall& call, const Tensor& output, const Tensor& input,
                         const Reduction& reduction) {
  auto options = call.options<c10d::ReduceScatterOptions>();
  options.reduceOp = reduction.op;
  return Plan{
      call, Kind::kOneCollective,
      [=, all = reduction(input), target = Target(output, reduction)]() mutable {
        const detail::NamedAs named(call.name(), all.sizes());
        return target.started(call.group()._reduce_scatter_base(target.buffers[0], all, options));
      }};
}

Plan plan_reduce_scatter(const Tensor& output, const Tensors& parts, c10d::ReduceOp op,
                         const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("reduce_scatter", group, timeout);
  call.require_output(output);
  call.require_parts_of(output, "parts", parts);
  const Reduction reduction(call, output, std::move(op));
  return plan_reduce_scatter(call, output, flat_cat(parts), reduction);
}

Plan plan_reduce_scatter_tensor(const Tensor& output, const Tensor& input, c10d::ReduceOp op,
                                const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("reduce_scatter_tensor", group, timeout);
  call.require_dense(input);
  call.require_output(output);
  call.require_like(output, input);
  call.require_whole("input", input, "output", output);
  const Reduction reduction(call, output, std::move(op));
  return plan_reduce_scatter(call, output, dense(input), reduction);
}

Plan plan_all_to_all(const Tensors& outputs, const Tensors& inputs, const GroupOrDefault& group,
                     Timeout timeout) {
  const CheckedCall call("all_to_all", group, timeout);
  call.require_list("inputs", inputs);
  call.require_list("outputs", outputs);
  call.require_like(outputs.front(), inputs.front());
  for (const Tensor& one : outputs) call.require_output(one);
  return Plan{
      call, Kind::kSeveralCollectives, [=, values = flat_cat(inputs)] {
        std::vector<int64_t> input_counts = element_counts(inputs);
        std::vector<int64_t> output_counts = element_counts(outputs);
        const Tensor results =
            at::empty({std::accumulate(output_counts.begin(), output_counts.end(), int64_t{0})},
                      values.options());
        Tensor sent = sendable(values);
        Tensor received = sendable(results);
        const auto slices = results.split_with_sizes(output_counts);
        if (sent.scalar_type() != values.scalar_type()) {  // sent as bytes
          const auto size = static_cast<int64_t>(values.element_size());
          for (int64_t& count : input_counts) count *= size;
          for (int64_t& count : output_counts) count *= size;
        }
        auto work = call.group().alltoall_base(received, sent, output_counts, input_counts,
                                               call.options<c10d::AllToAllOptions>());
        return Started{.work = std::move(work), .finish = [=](Outcome&) {
                         for (size_t rank = 0; rank < outputs.size(); ++rank) {
                           outputs[rank].detach().copy_(slices[rank].view(outputs[rank].sizes()));
                         }
                       }};
      }};
}

Plan plan_all_to_all_single(const Tensor& output, const Tensor& input,
                            const std::vector<int64_t>& output_split_sizes,
                            const std::vector<int64_t>& input_split_sizes,
                            const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("all_to_all_single", group, timeout);
  call.require_dense(input);
  call.require_output(output);
  call.require_like(output, input);
  call.require_splits("input", input_split_sizes, input);
  call.require_splits("output", output_split_sizes, output);
  if (output.sizes().slice(1) != input.sizes().slice(1)) {
    call.refuse(fmt::format("rows of the output, {}, and of the input, {}, have different sizes",
                            c10::str(output.sizes()), c10::str(input.sizes())));
  }
  const Tensor whole = output.detach();
  const Tensors outputs = output_split_sizes.empty() ? whole.chunk(call.size())
                                                     : whole.split_with_sizes(output_split_sizes);
  const Tensors inputs = input_split_sizes.empty() ? input.chunk(call.size())
                                                   : input.split_with_sizes(input_split_sizes);
  return plan_all_to_all(outputs, inputs, call.group_ptr(), timeout);
}

/// Adds the timeout of a send or recv, which take no options.
Started with_timeout_of(const CheckedCall& call, Started started) {
  started.timeout = call.timeout();
  started.since = std::chrono::steady_clock::now();
  return started;
}

Plan plan_send(const Tensor& tensor, int destination, const GroupOrDefault& group, int tag,
               Timeout timeout) {
  const CheckedCall call("send", group, timeout);
  call.require_peer("destination", destination, tag);
  call.require_dense(tensor);
  return Plan{call, Kind::kTransfer, [=, buffers = Tensors{sendable(dense(tensor))}]() mutable {
                return with_timeout_of(call,
                                       {.work = call.group().send(buffers, destination, tag)});
              }};
}

Plan plan_recv(const Tensor& tensor, int source, const GroupOrDefault& group, int tag,
               Timeout timeout) {
  const CheckedCall call("recv", group, timeout);
  call.require_peer("source", source, tag);
  call.require_output(tensor);
  return Plan{call, Kind::kTransfer, [=, target = Target(tensor)]() mutable {
                return with_timeout_of(
                    call, target.started(call.group().recv(target.buffers, source, tag)));
              }};
}

Plan plan_barrier(const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("barrier", group, timeout);
  return Plan{call, Kind::kOneCollective, [call] {
                return Started{.work = call.group().barrier(call.options<c10d::BarrierOptions>())};
              }};
}

// Collectives for bytes first exchange the sizes, which the buffers for the bytes need.

Plan plan_broadcast_bytes(const std::string& bytes, int root, const GroupOrDefault& group,
                          Timeout timeout) {
  const CheckedCall call("broadcast_bytes", group, timeout);
  call.require_rank("root", root);
  // A copy that is not const, so that a Plan moves it.
  return Plan{call, Kind::kSeveralCollectives, [=, bytes = bytes, g = call.group_ptr()] {
                const Tensor size = size_of(bytes);
                complete(plan_broadcast(size, root, g, timeout));
                const auto length = size.item<int64_t>();
                const Tensor buffer =
                    call.is_root(root) ? to_tensor(bytes, length) : at::empty({length}, at::kByte);
                Started started;
                if (length != 0) started = plan_broadcast(buffer, root, g, timeout).start();
                started.finish = [=](Outcome& outcome) {
                  outcome.bytes = {to_bytes(buffer, length)};
                };
                return started;
              }};
}

/// @param all_ranks return every rank's bytes on all ranks; otherwise on `root` only.
Plan plan_gather_bytes(const CheckedCall& call, const std::string& bytes, int root, bool all_ranks,
                       Waits waits) {
  return Plan{call, Kind::kSeveralCollectives, [=, bytes = bytes] {
                const ProcessGroupPtr& group = call.group_ptr();
                const Timeout timeout = call.timeout();
                const Tensors sizes =
                    complete(plan_all_gather(size_of(bytes), group, timeout, Waits::kNow)).tensors;
                int64_t longest = 1;  // Gloo gathers no empty tensors
                for (const Tensor& size : sizes) longest = std::max(longest, size.item<int64_t>());
                const Tensor own = to_tensor(bytes, longest);
                const Plan gather = all_ranks ? plan_all_gather(own, group, timeout, waits)
                                              : plan_gather(own, root, group, timeout);
                Started started = gather.start();
                // Makes bytes of the tensors that the call returns.
                started.finish = [finish = std::move(started.finish), sizes](Outcome& outcome) {
                  finish(outcome);
                  for (size_t rank = 0; rank < outcome.tensors.size(); ++rank) {
                    const auto size = sizes[rank].item<int64_t>();
                    outcome.bytes.push_back(to_bytes(outcome.tensors[rank], size));
                  }
                  outcome.tensors.clear();
                };
                return started;
              }};
}

Plan plan_all_gather_bytes(const std::string& bytes, const GroupOrDefault& group, Timeout timeout,
                           Waits waits) {
  const CheckedCall call("all_gather_bytes", group, timeout);
  return plan_gather_bytes(call, bytes, 0, /*all_ranks=*/true, waits);
}

Plan plan_gather_bytes(const std::string& bytes, int root, const GroupOrDefault& group,
                       Timeout timeout) {
  const CheckedCall call("gather_bytes", group, timeout);
  call.require_rank("root", root);
  return plan_gather_bytes(call, bytes, root, /*all_ranks=*/false, Waits::kLater);
}

Plan plan_scatter_bytes(const std::vector<std::string>& parts, int root,
                        const GroupOrDefault& group, Timeout timeout) {
  const CheckedCall call("scatter_bytes", group, timeout);
  call.require_rank("root", root);
  if (call.is_root(root)) {
    call.require_length("parts", parts.size());
  } else if (!parts.empty()) {
    call.refuse(fmt::format("it is given parts, and rank {} is the one that has them", root));
  }
  return Plan{
      call, Kind::kSeveralCollectives, [=, parts = parts, g = call.group_ptr()] {
        int64_t longest = 1;
        for (const std::string& one : parts) {
          longest = std::max(longest, static_cast<int64_t>(one.size()));
        }
        Tensors tensors;
        for (const std::string& one : parts) {
          tensors.push_back(at::tensor({static_cast<int64_t>(one.size()), longest}, at::kLong));
        }
        const Tensor sizes = at::zeros({2}, at::kLong);
        complete(plan_scatter(sizes, tensors, root, g, timeout));
        for (size_t rank = 0; rank < parts.size(); ++rank) {
          tensors[rank] = to_tensor(parts[rank], longest);
        }
        const Tensor buffer = at::zeros({sizes[1].item<int64_t>()}, at::kByte);
        Started started = plan_scatter(buffer, tensors, root, g, timeout).start();
        started.finish = [=](Outcome& outcome) {
          outcome.bytes = {to_bytes(buffer, sizes[0].item<int64_t>())};
        };
        return started;
      }};
}

}  // namespace

void all_reduce(Tensor& tensor, c10d::ReduceOp op, const GroupOrDefault& group, Timeout timeout) {
  complete(plan_all_reduce(tensor, std::move(op), group, timeout));
}

WorkPtr all_reduce_async(Tensor& tensor, c10d::ReduceOp op, const GroupOrDefault& group,
                         Timeout timeout) {
  return launch(plan_all_reduce(tensor, std::move(op), group, timeout));
}

void reduce(Tensor& tensor, GroupRank root, c10d::ReduceOp op, const GroupOrDefault& group,
            Timeout timeout) {
  complete(plan_reduce(tensor, root.in(group), std::move(op), group, timeout));
}

WorkPtr reduce_async(Tensor& tensor, GroupRank root, c10d::ReduceOp op, const GroupOrDefault& group,
                     Timeout timeout) {
  return launch(plan_reduce(tensor, root.in(group), std::move(op), group, timeout));
}

void broadcast(Tensor& tensor, GroupRank root, const GroupOrDefault& group, Timeout timeout) {
  complete(plan_broadcast(tensor, root.in(group), group, timeout));
}

WorkPtr broadcast_async(Tensor& tensor, GroupRank root, const GroupOrDefault& group,
                        Timeout timeout) {
  return launch(plan_broadcast(tensor, root.in(group), group, timeout));
}

Tensors all_gather(const Tensor& tensor, const GroupOrDefault& group, Timeout timeout) {
  return complete(plan_all_gather(tensor, group, timeout, Waits::kNow)).tensors;
}

WorkPtr all_gather_async(const Tensor& tensor, const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_all_gather(tensor, group, timeout, Waits::kLater));
}

void all_gather_into_tensor(Tensor& output, const Tensor& input, const GroupOrDefault& group,
                            Timeout timeout) {
  complete(plan_all_gather_into_tensor(output, input, group, timeout, Waits::kNow));
}

WorkPtr all_gather_into_tensor_async(Tensor& output, const Tensor& input,
                                     const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_all_gather_into_tensor(output, input, group, timeout, Waits::kLater));
}

Tensors gather(const Tensor& tensor, GroupRank root, const GroupOrDefault& group, Timeout timeout) {
  return complete(plan_gather(tensor, root.in(group), group, timeout)).tensors;
}

WorkPtr gather_async(const Tensor& tensor, GroupRank root, const GroupOrDefault& group,
                     Timeout timeout) {
  return launch(plan_gather(tensor, root.in(group), group, timeout));
}

void scatter(Tensor& tensor, const Tensors& parts, GroupRank root, const GroupOrDefault& group,
             Timeout timeout) {
  complete(plan_scatter(tensor, parts, root.in(group), group, timeout));
}

WorkPtr scatter_async(Tensor& tensor, const Tensors& parts, GroupRank root,
                      const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_scatter(tensor, parts, root.in(group), group, timeout));
}

void reduce_scatter(Tensor& output, const Tensors& parts, c10d::ReduceOp op,
                    const GroupOrDefault& group, Timeout timeout) {
  complete(plan_reduce_scatter(output, parts, std::move(op), group, timeout));
}

WorkPtr reduce_scatter_async(Tensor& output, const Tensors& parts, c10d::ReduceOp op,
                             const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_reduce_scatter(output, parts, std::move(op), group, timeout));
}

void reduce_scatter_tensor(Tensor& output, const Tensor& input, c10d::ReduceOp op,
                           const GroupOrDefault& group, Timeout timeout) {
  complete(plan_reduce_scatter_tensor(output, input, std::move(op), group, timeout));
}

WorkPtr reduce_scatter_tensor_async(Tensor& output, const Tensor& input, c10d::ReduceOp op,
                                    const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_reduce_scatter_tensor(output, input, std::move(op), group, timeout));
}

void all_to_all(Tensors& outputs, const Tensors& inputs, const GroupOrDefault& group,
                Timeout timeout) {
  complete(plan_all_to_all(outputs, inputs, group, timeout));
}

WorkPtr all_to_all_async(Tensors& outputs, const Tensors& inputs, const GroupOrDefault& group,
                         Timeout timeout) {
  return launch(plan_all_to_all(outputs, inputs, group, timeout));
}

void all_to_all_single(Tensor& output, const Tensor& input, std::vector<int64_t> output_split_sizes,
                       std::vector<int64_t> input_split_sizes, const GroupOrDefault& group,
                       Timeout timeout) {
  complete(
      plan_all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, timeout));
}

WorkPtr all_to_all_single_async(Tensor& output, const Tensor& input,
                                std::vector<int64_t> output_split_sizes,
                                std::vector<int64_t> input_split_sizes, const GroupOrDefault& group,
                                Timeout timeout) {
  return launch(
      plan_all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, timeout));
}

void send(const Tensor& tensor, GroupRank destination, const GroupOrDefault& group, int tag,
          Timeout timeout) {
  complete(plan_send(tensor, destination.in(group), group, tag, timeout));
}

WorkPtr isend(const Tensor& tensor, GroupRank destination, const GroupOrDefault& group, int tag,
              Timeout timeout) {
  return launch(plan_send(tensor, destination.in(group), group, tag, timeout));
}

void recv(Tensor& tensor, GroupRank source, const GroupOrDefault& group, int tag, Timeout timeout) {
  complete(plan_recv(tensor, source.in(group), group, tag, timeout));
}

WorkPtr irecv(Tensor& tensor, GroupRank source, const GroupOrDefault& group, int tag,
              Timeout timeout) {
  return launch(plan_recv(tensor, source.in(group), group, tag, timeout));
}

std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& ops, const GroupOrDefault& group,
                                       Timeout timeout) {
  std::vector<Plan> plans;  // all before the first start: none starts if one is refused
  for (const P2POp& op : ops) {
    plans.push_back(op.type == P2POp::Type::kSend
                        ? plan_send(op.tensor, op.peer, group, op.tag, timeout)
                        : plan_recv(op.tensor, op.peer, group, op.tag, timeout));
  }
  std::vector<WorkPtr> works;
  for (Plan& plan : plans) works.push_back(launch(std::move(plan)));
  return works;
}

void barrier(const GroupOrDefault& group, Timeout timeout) {
  complete(plan_barrier(group, timeout));
}

WorkPtr barrier_async(const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_barrier(group, timeout));
}

std::string broadcast_bytes(const std::string& bytes, GroupRank root, const GroupOrDefault& group,
                            Timeout timeout) {
  return complete(plan_broadcast_bytes(bytes, root.in(group), group, timeout)).bytes.front();
}

WorkPtr broadcast_bytes_async(const std::string& bytes, GroupRank root, const GroupOrDefault& group,
                              Timeout timeout) {
  return launch(plan_broadcast_bytes(bytes, root.in(group), group, timeout));
}

std::vector<std::string> all_gather_bytes(const std::string& bytes, const GroupOrDefault& group,
                                          Timeout timeout) {
  return complete(plan_all_gather_bytes(bytes, group, timeout, Waits::kNow)).bytes;
}

WorkPtr all_gather_bytes_async(const std::string& bytes, const GroupOrDefault& group,
                               Timeout timeout) {
  return launch(plan_all_gather_bytes(bytes, group, timeout, Waits::kLater));
}

std::vector<std::string> gather_bytes(const std::string& bytes, GroupRank root,
                                      const GroupOrDefault& group, Timeout timeout) {
  return complete(plan_gather_bytes(bytes, root.in(group), group, timeout)).bytes;
}

WorkPtr gather_bytes_async(const std::string& bytes, GroupRank root, const GroupOrDefault& group,
                           Timeout timeout) {
  return launch(plan_gather_bytes(bytes, root.in(group), group, timeout));
}

std::string scatter_bytes(const std::vector<std::string>& parts, GroupRank root,
                          const GroupOrDefault& group, Timeout timeout) {
  return complete(plan_scatter_bytes(parts, root.in(group), group, timeout)).bytes.front();
}

WorkPtr scatter_bytes_async(const std::vector<std::string>& parts, GroupRank root,
                            const GroupOrDefault& group, Timeout timeout) {
  return launch(plan_scatter_bytes(parts, root.in(group), group, timeout));
}

}  // namespace syncbn::dist
