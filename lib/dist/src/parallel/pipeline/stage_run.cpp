#include "pipeline/stage_run.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <ranges>
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

Tensors requiring_grad(const Tensors& tensors) {
  Tensors some;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(some),
               [](const at::Tensor& tensor) { return tensor.requires_grad(); });
  return some;
}

/// Concatenates micro-batches; the result is a leaf.
at::Tensor concatenated(const Tensors& parts) {
  if (parts.size() == 1) return parts.front();
  const at::NoGradGuard no_grad;
  return at::cat(parts).set_requires_grad(parts.front().requires_grad());
}

/// @throws base::UserError if the stage would pass no gradients to earlier stages that need them
void check_passes_gradients(const Tensors& inputs, const Tensors& outputs) {
  if (requiring_grad(inputs).empty() || !requiring_grad(outputs).empty()) return;
  throw base::UserError(
      "its outputs require no gradient although its input does, so the stages before it would not "
      "train; remove detach() or NoGradGuard, or freeze those stages with requires_grad_(false)");
}

/// @throws base::UserError unless the tensor has the samples of the whole batch
void check_samples(const at::Tensor& tensor, const std::vector<int64_t>& samples) {
  const int64_t all = std::accumulate(samples.begin(), samples.end(), int64_t{0});
  if (tensor.dim() > 0 && tensor.size(0) == all) return;
  throw base::UserError(fmt::format(
      "with statistics over the batch, the first dimension of each output must be the samples, "
      "which are {}; got {}",
      all, c10::str(tensor.sizes())));
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
                          fmt::format("PipelineParallel: {}{} failed in the {}: {}", placed_.name(),
                                      placed_.place, describe(action, inputs), message));
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

/// The messages of an action's micro-batches, concatenated.
Tensors StageRun::receive(Transfer& transfer, const PipelineAction& action,
                          Samples& samples) const {
  std::vector<Tensors> parts;  // by tensor
  for (int64_t i = 0; i < action.count; ++i) {
    const StageMessage message = transfer.receive(placed_.device);
    if (message.is_training != batch_.is_training) {
      throw base::UserError(fmt::format("it runs {}, its neighbour {}; call the same on all ranks",
                                        batch_.is_training ? "step()" : "forward()",
                                        message.is_training ? "step()" : "forward()"));
    }
    samples.push_back(message.samples);
    if (i == 0) parts.resize(message.tensors.size());
    const auto fits = [&](size_t j) {
      return message.tensors[j].requires_grad() == parts[j].front().requires_grad();
    };
    if (message.tensors.size() != parts.size() ||
        (i > 0 && !std::ranges::all_of(std::views::iota(size_t{0}, parts.size()), fits))) {
      throw base::UserError(
          "with statistics over the batch, every micro-batch must have as many tensors, and of the "
          "same tensors the gradients");
    }
    for (size_t j = 0; j < parts.size(); ++j) parts[j].push_back(message.tensors[j]);
  }
  Tensors all;
  std::ranges::transform(parts, std::back_inserter(all), concatenated);
  return all;
}

/// Sends each micro-batch's part of the tensors, without graphs, in a message of its own.
void StageRun::send(Transfer& transfer, const Tensors& tensors, const Samples& samples) const {
  std::vector<Tensors> parts(samples.size());
  for (const at::Tensor& tensor : tensors) {
    const bool is_whole = samples.size() == 1;
    if (!is_whole) check_samples(tensor, samples);
    const at::Tensor plain = tensor.detach();
    const Tensors pieces = is_whole ? Tensors{plain} : plain.split_with_sizes(samples, /*dim=*/0);
    for (size_t i = 0; i < samples.size(); ++i) {
      parts[i].push_back(pieces[i].detach().set_requires_grad(tensor.requires_grad()));
    }
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    transfer.send(
        {.tensors = std::move(parts[i]), .samples = samples[i], .is_training = batch_.is_training});
  }
}

void StageRun::forward(const PipelineAction& action, Tensors& inputs) {
  Samples samples;
  if (placed_.is_first()) {
    Tensors parts;
    for (int64_t i = action.first; i < action.first + action.count; ++i) {
      parts.push_back(batch_.inputs[static_cast<size_t>(i)]);
      samples.push_back(parts.back().size(0));
    }
    inputs = {to_stage(concatenated(parts), placed_.device)};
  } else {
    inputs = receive(*transfers_.inputs, action, samples);
    // The previous stage had received all gradients but the last when it sent these inputs.
    transfers_.input_gradients->release(1);
  }
  Kept kept{.inputs = inputs, .outputs = call(inputs), .samples = samples};
  if (batch_.is_training) check_passes_gradients(kept.inputs, kept.outputs);
  if (placed_.is_last()) {
    if (kept.outputs.size() != 1) {
      throw base::UserError(fmt::format("the last stage returned {}; it must return one",
                                        base::counted(std::ssize(kept.outputs), "tensor")));
    }
    if (batch_.is_training) {
      kept.outputs = {weighted_loss(kept.outputs.front(), action, samples)};
    } else {
      if (kept.outputs.front().dim() == 0) {
        throw base::UserError(
            "the last stage returned a scalar; the first dimension of its output must be the "
            "samples");
      }
      outputs_.push_back(kept.outputs.front());
    }
  } else {
    if (action.expects_gradients_of && placed_.device.is_cuda()) {
      transfers_.output_gradients->expect(
          requiring_grad(kept_.at(*action.expects_gradients_of).outputs));
    }
    send(*transfers_.outputs, kept.outputs, samples);
    sent_ += samples.size();
  }
  if (batch_.is_training) kept_.emplace(action.first, std::move(kept));
}

Tensors StageRun::call(const Tensors& inputs) const {
  DdpBase* const ddp = placed_.stage.ddp();
  if (ddp == nullptr || !batch_.is_training) return placed_.stage.forward(inputs);
  const auto guard = ddp->no_sync();
  return placed_.stage.forward(inputs);
}

at::Tensor StageRun::weighted_loss(const at::Tensor& output, const PipelineAction& action,
                                   const Samples& samples) {
  Tensors targets;
  int64_t own = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const at::Tensor& target = batch_.targets[static_cast<size_t>(action.first) + i];
    if (target.size(0) != samples[i]) {
      throw base::UserError(fmt::format("the target has {}, the input {}",
                                        base::counted(target.size(0), "sample"), samples[i]));
    }
    own += samples[i];
    targets.push_back(target);
  }
  at::Tensor loss = (*batch_.loss)(output, to_stage(concatenated(targets), placed_.device));
  if (!loss.defined() || loss.numel() != 1) {
    throw base::UserError(
        fmt::format("the loss must be one number, got {}",
                    loss.defined() ? c10::str(loss.sizes()) : "an undefined tensor"));
  }
  if (!loss.requires_grad()) {
    throw base::UserError(
        output.requires_grad()
            ? "the loss does not depend on the output, so there are no gradients"
            : "the loss requires no gradient, so nothing would train; call forward(), or set "
              "requires_grad_(true) on parameters");
  }
  if (batch_.average_losses) {
    int64_t all = 0;
    for (const at::Tensor& target : batch_.targets) all += target.size(0);
    loss = loss * (static_cast<double>(own) / static_cast<double>(all));
  }
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
    Samples samples;
    gradients = receive(*transfers_.output_gradients, action, samples);
    // The next stage has received the outputs that these gradients belong to.
    transfers_.outputs->release(sent_ - static_cast<size_t>(action.first + action.count));
  }
  const Tensors roots = requiring_grad(kept.outputs);
  DdpBase* const ddp = placed_.stage.ddp();
  if (is_last && ddp != nullptr) {
    if (roots.empty()) {
      throw base::UserError(
          "the outputs of the last micro-batch require no gradient, but DistributedDataParallel "
          "averages gradients in its backward; set find_unused_parameters");
    }
    ddp->average_next_backward(kept.outputs);
  }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
  if (placed_.is_first()) return;
  Tensors input_gradients;
  for (const at::Tensor& input : requiring_grad(kept.inputs)) {
    input_gradients.push_back(input.grad().defined() ? input.grad() : at::zeros_like(input));
  }
  send(*transfers_.input_gradients, input_gradients, kept.samples);
}

}  // namespace syncbn::dist::detail
