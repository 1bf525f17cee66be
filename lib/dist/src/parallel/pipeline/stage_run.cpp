#include "pipeline/stage_run.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "device_threads/named_error.h"

namespace syncbn::dist::detail {
namespace {

using Tensors = std::vector<at::Tensor>;
using Kind = PipelineAction::Kind;

Tensors those_with_gradient(const Tensors& tensors) {
  Tensors some;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(some),
               [](const at::Tensor& tensor) { return tensor.requires_grad(); });
  return some;
}

/// For each micro-batch its part of the tensors, without graphs.
std::vector<Tensors> split(const Tensors& tensors, const std::vector<int64_t>& samples) {
  std::vector<Tensors> messages(samples.size());
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor plain = tensor.detach();
    const Tensors parts =
        samples.size() == 1 ? Tensors{plain} : plain.split_with_sizes(samples, /*dim=*/0);
    for (size_t i = 0; i < samples.size(); ++i) {
      messages[i].push_back(parts[i].detach().set_requires_grad(tensor.requires_grad()));
    }
  }
  return messages;
}

/// Several micro-batches as one, as a leaf.
at::Tensor joined(const Tensors& parts) {
  if (parts.size() == 1) return parts.front();
  const at::NoGradGuard no_grad;
  return at::cat(parts).set_requires_grad(parts.front().requires_grad());
}

}  // namespace

std::string PlacedStage::name(int stage) const {
  return fmt::format("stage {} ({})", stage, names[static_cast<size_t>(stage)]);
}

void StageRun::run(const PipelineActions& actions) {
  for (const PipelineAction& action : actions) {
    Tensors inputs;
    try {
      if (action.kind == Kind::kForward) {
        forward(action, inputs);
      } else {
        backward(action, /*is_last=*/&action == &actions.back());
      }
    } catch (const StageAbandoned&) {
      throw;
    } catch (...) {
      rethrow_named([&](int exit_code, const std::string& message) {
        return StageError(placed_.index, exit_code,
                          fmt::format("PipelineParallel: {} failed in the {}: {}", placed_.name(),
                                      describe(action, inputs), message));
      });
    }
  }
}

/// "forward of micro-batch 1, on [4, 512] Float from stage 0 (Front)"
std::string StageRun::describe(const PipelineAction& action, const Tensors& inputs) const {
  std::string text = action.kind == Kind::kForward ? "forward" : "backward";
  text += action.count == 1 ? fmt::format(" of micro-batch {}", action.first)
                            : fmt::format(" of all {} micro-batches", action.count);
  std::vector<std::string> tensors;
  for (const at::Tensor& input : inputs) {
    tensors.push_back(
        fmt::format("{} {}", c10::str(input.sizes()), c10::toString(input.scalar_type())));
  }
  if (tensors.empty()) return text;
  text += ", on " + base::join(tensors, ", ");
  return placed_.is_first() ? text : text + " from " + placed_.name(placed_.index - 1);
}

/// The messages of an action's micro-batches as one.
Tensors StageRun::receive(Transfer& transfer, const PipelineAction& action,
                          std::vector<int64_t>& samples) const {
  std::vector<Tensors> parts;  // by tensor
  for (int64_t i = 0; i < action.count; ++i) {
    const Tensors message = transfer.receive(placed_.device);
    parts.resize(message.size());
    for (size_t j = 0; j < message.size(); ++j) parts[j].push_back(message[j]);
    samples.push_back(message.empty() || message[0].dim() == 0 ? 1 : message[0].size(0));
  }
  Tensors all;
  std::transform(parts.begin(), parts.end(), std::back_inserter(all), joined);
  return all;
}

void StageRun::forward(const PipelineAction& action, Tensors& inputs) {
  std::vector<int64_t> samples;
  if (placed_.is_first()) {
    Tensors parts;
    for (int64_t i = action.first; i < action.first + action.count; ++i) {
      parts.push_back(batch_.inputs[static_cast<size_t>(i)].detach());
      samples.push_back(parts.back().size(0));
    }
    inputs = {joined(parts).to(placed_.device, /*non_blocking=*/true)};
  } else {
    inputs = receive(*transfers_.inputs, action, samples);
    // The stage before has sent these after it had received all gradients but the last.
    transfers_.input_gradients->release(1);
  }
  Kept kept{.inputs = inputs, .outputs = call(inputs), .samples = samples};
  if (placed_.is_last()) {
    if (kept.outputs.size() != 1) {
      throw base::UserError(fmt::format("the last stage returned {}; it must return one",
                                        base::counted(std::ssize(kept.outputs), "tensor")));
    }
    if (batch_.loss != nullptr) {
      kept.outputs = {weighted_loss(kept.outputs.front(), action)};
    } else {
      outputs_.push_back(kept.outputs.front());
    }
  } else {
    if (action.asks_for) {
      transfers_.output_gradients->expect(those_with_gradient(kept_.at(*action.asks_for).outputs));
    }
    for (const Tensors& message : split(kept.outputs, samples)) {
      transfers_.outputs->send(message);
      ++sent_;
    }
  }
  if (batch_.loss != nullptr) kept_.emplace(action.first, std::move(kept));
}

Tensors StageRun::call(const Tensors& inputs) const {
  DdpBase* const ddp = placed_.stage.ddp();
  if (ddp == nullptr || batch_.loss == nullptr) return placed_.stage.forward(inputs);
  const auto guard = ddp->no_sync();
  return placed_.stage.forward(inputs);
}

at::Tensor StageRun::weighted_loss(const at::Tensor& output, const PipelineAction& action) {
  Tensors targets;
  int64_t all = 0;
  int64_t own = 0;
  for (int64_t i = 0; i < std::ssize(batch_.targets); ++i) {
    const at::Tensor& target = batch_.targets[static_cast<size_t>(i)];
    all += target.size(0);
    if (i < action.first || i >= action.first + action.count) continue;
    own += target.size(0);
    targets.push_back(target);
  }
  at::Tensor loss =
      (*batch_.loss)(output, joined(targets).to(placed_.device, /*non_blocking=*/true));
  if (!loss.defined() || loss.numel() != 1) {
    throw base::UserError(
        fmt::format("the loss must be one number, got {}",
                    loss.defined() ? c10::str(loss.sizes()) : "an undefined tensor"));
  }
  if (batch_.average_losses) loss = loss * (static_cast<double>(own) / static_cast<double>(all));
  const at::Tensor value = loss.detach().to(at::kDouble);
  loss_ = loss_.defined() ? loss_ + value : value;
  return loss;
}

void StageRun::backward(const PipelineAction& action, bool is_last) {
  const auto found = kept_.find(action.first);
  const Kept kept = std::move(found->second);
  kept_.erase(found);
  Tensors gradients;
  if (!placed_.is_last()) {
    std::vector<int64_t> samples;
    gradients = receive(*transfers_.output_gradients, action, samples);
    // The next stage has received the outputs to which the gradients belong.
    transfers_.outputs->release(sent_ - static_cast<size_t>(action.first + action.count));
  }
  const Tensors roots = those_with_gradient(kept.outputs);
  if (is_last && placed_.stage.ddp() != nullptr) {
    placed_.stage.ddp()->average_next_backward(kept.outputs);
  }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
  if (placed_.is_first()) return;
  Tensors input_gradients;
  for (const at::Tensor& input : those_with_gradient(kept.inputs)) {
    input_gradients.push_back(input.grad().defined() ? input.grad() : at::zeros_like(input));
  }
  for (const Tensors& message : split(input_gradients, kept.samples)) {
    transfers_.input_gradients->send(message);
  }
}

}  // namespace syncbn::dist::detail
