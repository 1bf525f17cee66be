#include <algorithm>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "autograd_node.h"
#include "ddp/ddp_state.h"

namespace syncbn::dist::detail {
namespace {

struct JoinOutputs : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    on_backward();
    gradients.resize(next_edges().size());  // the anchor's gradient is undefined
    return std::move(gradients);
  }
  std::function<void()> on_backward;
};

}  // namespace

bool reach_any(const std::vector<at::Tensor>& outputs,
               const std::vector<const torch::autograd::Node*>& leaves) {
  std::vector<const torch::autograd::Node*> open;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!open.empty()) {
    const torch::autograd::Node* const node = open.back();
    open.pop_back();
    if (node->next_edges().empty() && std::ranges::count(leaves, node) > 0) return true;
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return false;
}

std::vector<at::Tensor> join_outputs(std::vector<at::Tensor> outputs, const at::Tensor& anchor,
                                     std::function<void()> on_backward) {
  const auto node = make_node<JoinOutputs>();
  node->on_backward = std::move(on_backward);
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(outputs);
  if (anchor.defined()) edges.push_back(torch::autograd::impl::gradient_edge(anchor));
  node->set_next_edges(std::move(edges));
  const auto requires_grad = [](const at::Tensor& output) { return output.requires_grad(); };
  const bool all = anchor.defined() && std::none_of(outputs.begin(), outputs.end(), requires_grad);
  for (at::Tensor& output : outputs) {
    const auto index = node->add_input_metadata(output);
    const bool can = all && (output.is_floating_point() || output.is_complex());
    if (!output.requires_grad() && !can) continue;
    // Not a view, which users could not modify in place, nor an alias, which would hide the change
    // from the graph.
    const at::NoGradGuard no_grad;
    output = output.clone();
    torch::autograd::impl::set_gradient_edge(output, {node, index});
  }
  return outputs;
}

}  // namespace syncbn::dist::detail
