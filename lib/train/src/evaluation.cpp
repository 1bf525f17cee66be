#include "evaluation.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/trainer.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "training_step.h"

namespace syncbn::train {

Evaluator::Evaluator(const Config& config, const Inputs& inputs, const Task& task,
                     const BatchToDevice& to_device, const data::LoaderOptions& loader_options)
    : config_(config),
      inputs_(inputs),
      task_(task),
      to_device_(to_device),
      loader_options_(loader_options) {
  loader_options_.drop_last = false;
}

Evaluation Evaluator::evaluate(models::Model& model) const {
  const at::NoGradGuard no_grad;
  model.eval();
  data::Loader loader(inputs_.eval_set,
                      std::make_shared<data::SequentialShardSampler>(
                          inputs_.eval_set->size(), dist::world_size(), dist::rank()),
                      loader_options_);
  loader.start_epoch(0);
  const at::Device device = dist::device();
  at::Tensor counts = at::zeros({task_.num_counts()}, at::TensorOptions(at::kLong).device(device));
  // Loss, samples, samples left out, ranks with a damaged sample.
  at::Tensor sums = at::zeros({4}, at::TensorOptions(at::kDouble).device(device));
  std::exception_ptr damaged;
  try {
    while (const auto batch = loader.next()) {
      const Autocast autocast(config_, device);
      at::Tensor output = model.forward(to_device_.input(*batch));
      if (at::isReducedFloatingType(output.scalar_type())) output = output.to(at::kFloat);
      const at::Tensor target = to_device_.target(*batch);
      sums[0].add_(task_.loss_sum(output, target));
      sums[1].add_(batch->size());
      counts.add_(task_.counts(output, target));
    }
  } catch (const base::UserError&) {
    damaged = std::current_exception();
    sums[3].fill_(1);
  }
  sums[2].fill_(loader.skipped());
  dist::all_reduce(sums);
  dist::all_reduce(counts);
  const at::Tensor all = sums.cpu();
  const double* const values = all.const_data_ptr<double>();
  if (values[3] > 0) {
    if (damaged) std::rethrow_exception(damaged);
    throw QuietExit{base::kExitUsage};
  }
  const at::Tensor host_counts = counts.cpu();
  return {.loss = values[0] / std::max(values[1], 1.0),
          .metrics = task_.metrics(
              {host_counts.const_data_ptr<int64_t>(), static_cast<size_t>(host_counts.numel())}),
          .samples = static_cast<int64_t>(values[1]),
          .skipped = static_cast<int64_t>(values[2])};
}

void prepare_statistics(const Config& config, const Inputs& inputs, models::Model& model,
                        const BatchToDevice& to_device, const data::LoaderOptions& loader_options,
                        int64_t seed) {
  if (config.update_bn_stats > 0) {
    model.train();
    data::Loader loader(inputs.train_set, inputs.make_sampler(seed), loader_options);
    const int64_t batches = std::min(config.update_bn_stats, loader.num_batches());
    loader.start_epoch(0);
    dist::update_bn_stats(
        model,
        [&](int64_t) {
          const Autocast autocast(config, dist::device());
          if (const auto batch = loader.next()) model.forward(to_device.input(*batch));
        },
        batches);
  }
  if (config.distribute_bn != "none") {
    dist::distribute_bn(model, config.distribute_bn == "reduce");
  }
}

}  // namespace syncbn::train
