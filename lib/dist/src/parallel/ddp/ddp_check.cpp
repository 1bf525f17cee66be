#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include <torch/csrc/autograd/variable.h>

#include "ddp/ddp_state.h"
#include "groups/world.h"

namespace syncbn::dist::detail {
namespace {

/// One line for the options and one per tensor.
std::vector<std::string> describe(const DdpOptions& options,
                                  const std::vector<NamedTensor>& parameters,
                                  const std::vector<NamedTensor>& buffers) {
  std::vector<std::string> lines{fmt::format(
      "the options broadcast_buffers={}, find_unused_parameters={}, static_graph={}, "
      "skip_all_reduce_unused_params={}, init_sync={}, bucket_cap_mb={}, first_bucket_cap_mb={}",
      options.broadcast_buffers, options.find_unused_parameters, options.static_graph,
      options.skip_all_reduce_unused_params, options.init_sync, options.bucket_cap_mb.value_or(0),
      options.first_bucket_cap_mb.value_or(0))};
  const auto add = [&lines](const NamedTensor& one, const char* kind) {
    lines.push_back(fmt::format("{} {} {}{}", one.name, c10::str(one.tensor.sizes()),
                                c10::toString(one.tensor.scalar_type()), kind));
  };
  for (const NamedTensor& one : parameters) {
    add(one, one.tensor.requires_grad() ? "" : " (without gradient)");
  }
  for (const NamedTensor& one : buffers) add(one, " (buffer)");
  return lines;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void check_same_module(const DdpOptions& options, const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const ProcessGroupPtr& group) {
  if (group->getSize() == 1 || backend_of(group) == nullptr || !all_ranks_are_ours(group)) return;
  const std::string own = base::join(describe(options, parameters, buffers), "\n");
  const std::vector<std::string> all = all_gather_bytes(own, group);
  const auto differs =
      std::find_if_not(all.begin(), all.end(), [&](const auto& one) { return one == all.front(); });
  if (differs == all.end()) return;
  const auto first = lines_of(all.front());
  const auto other = lines_of(*differs);
  const auto [a, b] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
  throw base::UserError(fmt::format(
      "DistributedDataParallel: the module or its options differ between ranks: rank {} has {}, "
      "rank {} has {}; wrap the same module in the same way on every rank",
      world_rank(group, 0), a == first.end() ? "nothing" : *a,
      world_rank(group, differs - all.begin()), b == other.end() ? "nothing" : *b));
}

std::optional<at::Device> check_devices(const std::vector<at::Device>& devices) {
  const at::Device first = devices.front();
  bool several = false;
  for (const at::Device& device : devices) {
    if (device.type() != first.type()) {
      throw base::UserError(
          fmt::format("DistributedDataParallel: the module has parameters on {} and on {}; move it "
                      "to one type of device",
                      first.str(), device.str()));
    }
    several = several || device != first;
  }
  return several ? std::nullopt : std::optional(first);
}

void explain_unfinished_reduction(const std::string& message,
                                  const std::vector<NamedTensor>& parameters) {
  // "... Parameter indices which did not receive grad for rank 0: 2 3 ..."
  constexpr std::string_view kBeforeRank = "indices which did not receive grad for rank ";
  const size_t at = message.find(kBeforeRank);
  if (at == std::string::npos) return;
  std::istringstream indices(message.substr(at + kBeforeRank.size()));
  std::string rank_and_colon;
  indices >> rank_and_colon;
  std::vector<std::string> names;
  for (size_t index = 0; indices >> index && index < parameters.size();) {
    names.push_back(parameters[index].name);
  }
  if (names.empty()) return;
  throw base::UserError(fmt::format(
      "DistributedDataParallel: in the step before, these parameters got no gradient on this rank, "
      "and the other ranks wait for it: {}; set find_unused_parameters (or static_graph, if they "
      "are the same in every step), use all outputs of forward in the loss, or freeze the "
      "parameters (requires_grad)",
      base::join(names, ", ")));
}

void check_unchanged(const DdpState& state) {
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    const at::Tensor& tensor = state.parameters[i].tensor;
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    if (accumulator.get() == state.accumulators[i]) continue;
    throw base::UserError(fmt::format(
        "DistributedDataParallel: the parameter {} was moved or converted after the module was "
        "wrapped (it is {} on {} now), and its gradients would not be averaged; call to() before "
        "wrapping",
        state.parameters[i].name, c10::toString(tensor.scalar_type()), tensor.device().str()));
  }
  for (const NamedTensor& one : state.frozen) {
    if (!one.tensor.requires_grad()) continue;
    throw base::UserError(fmt::format(
        "DistributedDataParallel: the parameter {} requires a gradient now and did not when the "
        "module was wrapped, so its gradient would not be averaged; wrap the module again after "
        "unfreezing",
        one.name));
  }
}

}  // namespace syncbn::dist::detail
