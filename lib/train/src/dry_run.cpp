#include "dry_run.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/data/loader.h>
#include <syncbn/dist/process_group.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "rank_0.h"
#include "training_step.h"

namespace syncbn::train {
namespace {

constexpr int kWarmUp = 2;  // steps that are not timed
constexpr int kTimed = 8;

thread_local int64_t t_multiply_adds = 0;

/// What each value of an operator's result takes.
struct PerResult : at::ObserverContext {
  explicit PerResult(int64_t work) : multiply_adds(work) {}
  int64_t multiply_adds;
};

/// A convolution takes a filter's values, a product the common dimension. Called ahead of the
/// operator, since its inputs are gone afterwards.
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

/// "11.7 M"
std::string with_prefix(double number) {
  for (const auto& [unit, prefix] : {std::pair{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (number >= unit) return fmt::format("{:.3g} {}", number / unit, prefix);
  }
  return fmt::format("{:.0f}", number);
}

/// The largest memory of this process so far.
size_t peak_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

struct Cost {
  double step = 0;  ///< seconds, the median
  double wait = 0;  ///< seconds of it that are spent waiting for data
};

Cost measure(TrainingStep& step, data::Loader& loader, double lr) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  double wait = 0;
  int64_t epoch = 0;
  step.train();
  loader.start_epoch(epoch);
  for (int i = 0; i < kWarmUp + kTimed; ++i) {
    const auto begin = Clock::now();
    auto batch = loader.next();
    if (!batch) {
      loader.start_epoch(++epoch);
      batch = loader.next();
    }
    data::SampleRandom random(0, 0, i);
    step.run(*batch, lr, random, {});
    step.finish();
    if (i < kWarmUp) continue;
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    wait += loader.wait_seconds() / kTimed;
  }
  std::ranges::nth_element(times, times.begin() + kTimed / 2);
  return {.step = times[kTimed / 2], .wait = wait};
}

}  // namespace

int64_t multiply_adds(models::Model& model, const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  model.eval();
  t_multiply_adds = 0;
  const at::CallbackHandle handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(look_at_inputs, look_at_results)
                                     .needsInputs(true)
                                     .needsOutputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
  model.forward(input);
  at::removeCallback(handle);
  return t_multiply_adds;
}

int dry_run(const Config& config, const std::string& name, const Inputs& inputs) {
  const int64_t seed = config.seed.value_or(0);
  const auto model = make_model(config, *inputs.train_set, seed);
  const auto task = config.task.make(*inputs.train_set);
  const BatchToDevice to_device({.device = dist::device(),
                                 .memory_format = memory_format(config, *model),
                                 .normalization = inputs.train_set->normalization()});
  std::vector<int64_t> one = inputs.train_set->sample_shape();
  one.insert(one.begin(), 1);
  const int64_t work = multiply_adds(*model, at::zeros(one, at::TensorOptions(dist::device())));
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += parameter.numel();

  TrainingStep step(config, *task, to_device, model);
  data::Loader loader(inputs.train_set, inputs.make_sampler(seed),
                      config.loader.options(inputs.batch_size));
  const Cost cost = measure(step, loader, step.optimizer().base_lr());
  if (!is_rank_0()) return base::kExitOk;
  const auto samples = static_cast<double>(inputs.batch_size * dist::world_size());
  const int64_t steps = std::min(config.epochs * loader.num_batches(),
                                 config.max_steps.value_or(config.epochs * loader.num_batches()));
  spdlog::info("{}: {} parameters, {} multiply-adds a sample", name,
               with_prefix(static_cast<double>(parameters)),
               with_prefix(static_cast<double>(work)));
  spdlog::info("a step of {} x batch {}: {}, {:.0f} images/s, data wait {:.1f} %",
               base::counted(dist::world_size(), "rank"), inputs.batch_size,
               base::format_seconds(cost.step), samples / cost.step, 100 * cost.wait / cost.step);
  spdlog::info("peak memory of rank 0: {}", base::format_bytes(peak_bytes()));
  spdlog::info("{} in {}: {} without evaluation", base::counted(steps, "step"),
               base::counted(config.epochs, "epoch"),
               base::format_seconds(static_cast<double>(steps) * cost.step));
  return base::kExitOk;
}

}  // namespace syncbn::train
