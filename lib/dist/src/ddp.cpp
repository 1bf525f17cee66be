#include <syncbn/dist/ddp.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace syncbn::dist::detail {
namespace {

constexpr size_t kBroadcastBucketBytes = size_t{250} * 1024 * 1024;
constexpr double kBytesPerMiB = 1024.0 * 1024.0;

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// The parameters that get gradients, each once however often the module refers to it.
std::vector<NamedParameter> trained_parameters(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.requires_grad() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    parameters.push_back({item.key(), tensor});
  }
  return parameters;
}

std::string describe(const std::vector<NamedParameter>& parameters) {
  std::string text;
  for (const NamedParameter& parameter : parameters) {
    text += fmt::format("{} {} {}\n", parameter.name, c10::str(parameter.tensor.sizes()),
                        c10::toString(parameter.tensor.scalar_type()));
  }
  return text;
}

std::string line_at(const std::string& text, size_t line) {
  size_t begin = 0;
  for (; line > 0 && begin < text.size(); --line) {
    begin = std::min(text.find('\n', begin), text.size() - 1) + 1;
  }
  if (begin >= text.size()) return "nothing";
  return text.substr(begin, text.find('\n', begin) - begin);
}

at::Tensor to_bytes(const std::string& text, int64_t size) {
  at::Tensor bytes = at::zeros({size}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

/// Every rank learns whether the parameters are the same on all of them, and which one is not.
void verify_same_parameters(const std::vector<NamedParameter>& parameters,
                            const ProcessGroupPtr& group) {
  if (group->getSize() == 1) return;
  const std::string own = describe(parameters);
  const auto hash = static_cast<int64_t>(std::hash<std::string>{}(own));
  const at::Tensor summary = at::tensor({hash, static_cast<int64_t>(own.size())}, at::kLong);
  const std::vector<at::Tensor> summaries = all_gather(summary, group);
  int64_t longest = 0;
  bool same = true;
  for (const at::Tensor& one : summaries) {
    same = same && one.equal(summaries[0]);
    longest = std::max(longest, one[1].item<int64_t>());
  }
  if (same) return;
  const std::vector<at::Tensor> texts = all_gather(to_bytes(own, longest), group);
  const auto text_of = [&](size_t rank) {
    return std::string(static_cast<const char*>(texts[rank].data_ptr()),
                       static_cast<size_t>(summaries[rank][1].item<int64_t>()));
  };
  const std::string first = text_of(0);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const std::string other = text_of(rank);
    if (other == first) continue;
    size_t line = 0;
    while (line_at(first, line) == line_at(other, line)) ++line;
    throw base::UserError(fmt::format(
        "DistributedDataParallel: the module differs between ranks: rank 0 has {}, rank {} has {} "
        "(parameter {} in order); build the same module on every rank",
        line_at(first, line), rank, line_at(other, line), line));
  }
}

/// Copies rank 0's tensors over everybody's. On aliases with version counters of their own: an
/// overwritten buffer must not make a graph that saved it invalid (two forwards, then a backward).
void broadcast_from_first(const std::vector<at::Tensor>& tensors, const ProcessGroupPtr& group) {
  if (tensors.empty() || group->getSize() == 1) return;
  std::vector<at::Tensor> aliases;
  aliases.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) aliases.push_back(tensor.variable_data());
  c10d::broadcast_coalesced(group, aliases, kBroadcastBucketBytes, /*rank=*/0);
}

/// The identity on all outputs at once. When the loss uses only some of them, the others' graphs
/// still run, with undefined gradients: their parameters count as ready instead of being waited
/// for.
struct JoinOutputs : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

/// Autograd's nodes are held by shared_ptr in libtorch 2.11 and by intrusive_ptr in 2.15.
template <class Pointer, class Made>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Made>();
  } else {
    return c10::make_intrusive<Made>();
  }
}

std::vector<at::Tensor> join_outputs(std::vector<at::Tensor> outputs) {
  const auto node = make_node<decltype(torch::autograd::Edge::function), JoinOutputs>();
  node->set_next_edges(torch::autograd::collect_next_edges(outputs));
  for (at::Tensor& output : outputs) {
    const auto index = node->add_input_metadata(output);
    if (!output.requires_grad()) continue;
    const at::NoGradGuard no_grad;  // a plain view, whose history is the node's alone
    output = output.view_as(output);
    torch::autograd::impl::set_gradient_edge(output, {node, index});
  }
  return outputs;
}

at::Device device_of(const std::vector<NamedParameter>& parameters) {
  return parameters.front().tensor.device();
}

}  // namespace

struct DdpCore::State {
  std::shared_ptr<torch::nn::Module> module;
  DdpOptions options;
  ProcessGroupPtr group;
  std::vector<NamedParameter> parameters;
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  bool require_sync = true;
  /// False after a forward under no_sync: the buffers then stay as they are, as in PyTorch.
  bool sync_buffers_next = true;
};

DdpCore::DdpCore(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.module = std::move(module);
  state.options = options;
  state.group = options.process_group ? options.process_group : default_group();
  state.parameters = trained_parameters(*state.module);
  verify_same_parameters(state.parameters, state.group);
  if (state.parameters.empty()) {
    throw base::UserError(
        "DistributedDataParallel: the module has no parameter that requires a gradient; it needs "
        "no "
        "wrapper");
  }
  if (options.bucket_cap_mb && !(*options.bucket_cap_mb > 0)) {
    throw base::UserError(fmt::format(
        "DistributedDataParallel: bucket_cap_mb must be above 0, got {}", *options.bucket_cap_mb));
  }
  if (options.init_sync) {
    std::vector<at::Tensor> all = state.module->parameters();
    for (const at::Tensor& buffer : state.module->buffers()) all.push_back(buffer);
    broadcast_from_first(all, state.group);
  }

  std::vector<at::Tensor> tensors;
  std::unordered_map<size_t, std::string> names;
  for (const NamedParameter& parameter : state.parameters) {
    names[tensors.size()] = parameter.name;
    tensors.push_back(parameter.tensor);
  }
  // PyTorch's sizes: a small first bucket, so that communication starts early in backward.
  const int64_t cap = options.bucket_cap_mb
                          ? static_cast<int64_t>(*options.bucket_cap_mb * kBytesPerMiB)
                          : c10d::kDefaultBucketBytesCap;
  const int64_t first_cap = options.bucket_cap_mb ? cap : c10d::kDefaultFirstBucketBytes;
  // One bucket until the order of gradients is known and buckets are rebuilt, as in PyTorch (only
  // then are the sums the same bits). With unused parameters they never are, so these must do.
  const std::vector<size_t> limits =
      options.find_unused_parameters
          ? std::vector{static_cast<size_t>(first_cap), static_cast<size_t>(cap)}
          : std::vector{static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  const std::vector<bool> sparse(tensors.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, limits, sparse));
  // Gradients become ready from the last layer to the first.
  std::reverse(buckets.begin(), buckets.end());
  state.reducer = std::make_shared<c10d::Reducer>(
      tensors, std::move(buckets), state.group, sparse, cap, options.find_unused_parameters,
      options.gradient_as_bucket_view, std::move(names), first_cap,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      std::vector<int64_t>{});
  state.logger = std::make_shared<c10d::Logger>(state.reducer);
  const at::Device device = device_of(state.parameters);
  state.logger->set_construction_data_and_log(
      state.module->name(),
      device.is_cuda() ? std::vector<int>{device.index()} : std::vector<int>{},
      device.is_cuda() ? device.index() : -1, options.broadcast_buffers,
      /*has_sync_bn=*/false, /*static_graph=*/false);
  state.reducer->set_logger(state.logger);
}

DdpCore::~DdpCore() = default;

void DdpCore::before_forward() {
  State& state = *state_;
  if (at::GradMode::is_enabled() && state.require_sync) {
    state.logger->set_runtime_stats_and_log();
    state.reducer->prepare_for_forward();
  }
  // After the first backward, buckets follow the order in which gradients became ready.
  if (at::GradMode::is_enabled()) state.reducer->rebuild_buckets();
  if (state.options.broadcast_buffers && state.sync_buffers_next) {
    broadcast_from_first(state.module->buffers(), state.group);
  }
}

std::vector<at::Tensor> DdpCore::after_forward(std::vector<at::Tensor> outputs) {
  State& state = *state_;
  // As in PyTorch: a forward that leads to no exchange of gradients leaves the next one's buffers.
  const bool exchanges = at::GradMode::is_enabled() && state.require_sync;
  state.sync_buffers_next = exchanges;
  if (!exchanges) return outputs;
  if (!state.options.find_unused_parameters) {
    state.reducer->prepare_for_backward({});
    return outputs;
  }
  if (outputs.empty()) {
    throw base::UserError(
        "DistributedDataParallel: find_unused_parameters found no tensor in the output of forward; "
        "return tensors, or optionals, pairs, tuples, vectors or maps of them");
  }
  state.reducer->prepare_for_backward(outputs);
  return join_outputs(std::move(outputs));
}

bool DdpCore::require_sync() const {
  return state_->require_sync;
}

void DdpCore::set_require_sync(bool on) {
  state_->require_sync = on;
}

void DdpCore::zero_grad() {
  for (const NamedParameter& parameter : state_->parameters) {
    parameter.tensor.mutable_grad() = at::Tensor();
  }
}

at::Device DdpCore::device() const {
  return device_of(state_->parameters);
}

}  // namespace syncbn::dist::detail
