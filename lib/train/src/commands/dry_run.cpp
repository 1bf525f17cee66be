#include "commands/commands.h"

#include <fmt/format.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/log.h>
#include <syncbn/base/median.h>
#include <syncbn/base/text.h>
#include <syncbn/data/loader.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "common/rank_0.h"
#include "records/memory_gauge.h"
#include "records/progress.h"
#include "run_display.h"
#include "step/compute_threads.h"
#include "step/training_step.h"

namespace syncbn::train {
namespace {

constexpr int kWarmUp = 2;  // steps that are not timed
constexpr int kTimed = 8;

/// "11.7 M"
std::string with_prefix(double number) {
  for (const auto& [unit, prefix] : {std::pair{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (number >= unit) return fmt::format("{:.3g} {}", number / unit, prefix);
  }
  return fmt::format("{:.0f}", number);
}

struct Cost {
  double step = 0;  ///< seconds, the median
  double wait = 0;  ///< seconds of it that are spent waiting for data
};

Cost measure(TrainingStep& step, data::Loader& loader, double lr) {
  AgentChannel channel(dist::rank());
  Progress progress(channel);
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  double wait = 0;
  int64_t epoch = 0;
  step.train();
  loader.start_epoch(epoch);
  for (int i = 0; i < kWarmUp + kTimed; ++i) {
    if (is_rank_0()) progress.show(i, kWarmUp + kTimed, [] { return std::string("dry run"); });
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
    times.push_back(base::seconds_since(begin));
    wait += loader.wait_seconds() / kTimed;
  }
  return {.step = base::lower_median(times), .wait = wait};
}

}  // namespace

int dry_run(const Config& config, const std::string& name, const Inputs& inputs) {
  const int64_t seed = config.seed.value_or(0);
  const auto model = make_model(config, *inputs.train_set, seed);
  init_model(config, *model);
  choose_threads(config, *model, *inputs.train_set, inputs.batch_size);
  const auto task = make_task(config, *inputs.train_set, *model);
  const data::LoaderOptions loader_options =
      config.loader.options(inputs.batch_size, dist::device());
  const BatchToDevice to_device =
      batch_to_device(config, *model, *inputs.train_set, loader_options.pin_memory);
  const int64_t work = multiply_adds(*model, inputs.train_set->sample_shape());
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += parameter.numel();

  TrainingStep step(config, *task, to_device, model,
                    make_replicas(config, *inputs.train_set, *task, model));
  data::Loader loader(inputs.train_set, inputs.make_sampler(seed), loader_options);
  const Cost cost = measure(step, loader, step.optimizer().base_lr());
  if (!is_rank_0()) return base::kExitOk;
  const auto samples = static_cast<double>(inputs.batch_size * dist::world_size());
  const int64_t epochs = config.epochs - config.start_epoch;
  const int64_t steps = std::min(epochs * loader.num_batches(),
                                 config.max_steps.value_or(epochs * loader.num_batches()));
  spdlog::info("{}: {} parameters, {} multiply-adds a sample", name,
               with_prefix(static_cast<double>(parameters)),
               with_prefix(static_cast<double>(work)));
  spdlog::info("a step of {} x batch {}: {}, {}, data wait {:.1f} %",
               base::counted(dist::world_size(), "rank"), inputs.batch_size,
               base::format_seconds(cost.step), rate(samples / cost.step),
               100 * cost.wait / cost.step);
  spdlog::info("peak memory of rank 0: {}",
               base::format_bytes(static_cast<uint64_t>(peak_resident_bytes())));
  spdlog::info("{} in {}: {} without evaluation", base::counted(steps, "step"),
               base::counted(epochs, "epoch"),
               base::format_seconds(static_cast<double>(steps) * cost.step));
  return base::kExitOk;
}

}  // namespace syncbn::train
