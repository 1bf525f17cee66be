#include "step/compute_threads.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <syncbn/base/env.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/signal_mask.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>

#include "step/early_signals.h"

namespace syncbn::train {
namespace {

// Below this, threads cost more than they save (docs/training.md).
constexpr int64_t kWorthThreads = 10'000'000;  // multiply-adds of a forward pass

thread_local int64_t t_multiply_adds = 0;

/// Multiply-adds for each value of an operator's result.
struct PerResult : at::ObserverContext {
  explicit PerResult(int64_t work) : multiply_adds(work) {}
  int64_t multiply_adds;
};

/// A convolution takes as many as a filter has values, a product the common dimension. Called
/// before the operator, since its inputs are gone afterwards.
std::unique_ptr<at::ObserverContext> look_at_inputs(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  const auto inputs = function.inputs();
  if (name == "aten::convolution") {
    const at::Tensor& weight = inputs[1].toTensor();
    return std::make_unique<PerResult>(weight.numel() / weight.size(0));
  }
  if (name == "aten::addmm") return std::make_unique<PerResult>(inputs[1].toTensor().size(-1));
  if (name == "aten::mm" || name == "aten::bmm") {
    return std::make_unique<PerResult>(inputs[0].toTensor().size(-1));
  }
  return nullptr;
}

void look_at_results(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto* const each = dynamic_cast<const PerResult*>(context);
  if (each == nullptr || function.outputs().empty()) return;
  t_multiply_adds += function.outputs()[0].toTensor().numel() * each->multiply_adds;
}

}  // namespace

int64_t multiply_adds(models::Model& model, std::vector<int64_t> sample_shape) {
  sample_shape.insert(sample_shape.begin(), 1);
  const at::NoGradGuard no_grad;
  model.eval();
  t_multiply_adds = 0;
  const at::CallbackHandle handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(look_at_inputs, look_at_results)
                                     .needsInputs(true)
                                     .needsOutputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
  model.forward(at::zeros(sample_shape, model.parameters().front().options()));
  at::removeCallback(handle);
  return t_multiply_adds;
}

void spare_waiting_threads(const Config& config, const std::vector<std::string>& args) {
  const int64_t threads = config.threads > 0 ? config.threads : at::get_num_threads();
  if (threads == 1 || base::env("OMP_WAIT_POLICY") || base::env("GOMP_SPINCOUNT")) return;
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return;
  // libgomp has already read its environment, so the program starts anew.
  ::setenv("GOMP_SPINCOUNT", "10000", /*replace=*/0);
  std::vector<std::string> words = {base::program_file().string()};
  words.insert(words.end(), args.begin(), args.end());
  const base::SignalMask held(SIG_BLOCK, kEarlySignals);
  // If this fails, training is only slower on busy cores.
  ::execv(program.c_str(), base::argv_of(words).data());
}

void choose_threads(const Config& config, models::Model& model, const data::Dataset& dataset,
                    int64_t batch_size) {
  if (config.threads > 0 || at::get_num_threads() == 1 || model.parameters().front().is_cuda())
    return;
  const int64_t part = (batch_size + config.accumulate - 1) / config.accumulate;
  // A network uses each parameter at least once per sample: a large one needs no trial forward
  // pass.
  int64_t least = 0;
  for (const at::Tensor& parameter : model.parameters()) least += parameter.numel();
  if (least * part >= kWorthThreads) return;
  if (multiply_adds(model, dataset.sample_shape()) * part < kWorthThreads) at::set_num_threads(1);
}

}  // namespace syncbn::train
