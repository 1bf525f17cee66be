#include "evaluation.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/trainer.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "common/component_error.h"
#include "common/gathered.h"
#include "common/rank_0.h"
#include "records/contact_sheet.h"
#include "records/mistakes.h"
#include "records/worst_samples.h"
#include "step/stopping.h"
#include "step/training_step.h"

namespace syncbn::train {

namespace {

/// Runs work on batches and exchanges the ranks' wishes. If a sample is damaged, or the network,
/// the task or a metric throws on any rank, all ranks leave together.
/// @param work returns this rank's wishes
/// @return the wishes of all ranks
/// @throws what `work` throws on this rank, QuietExit on the other ranks
Wishes run_and_share_wishes(const std::function<Wishes()>& work) {
  std::exception_ptr damage;
  int code = base::kExitOk;
  const auto note = [&](const base::Error& error) {
    damage = std::current_exception();
    code = error.exit_code();
  };
  Wishes own;
  try {
    own = work();
  } catch (const base::UserError& error) {
    note(error);
  } catch (const ComponentError& error) {
    note(error);
  }
  at::Tensor all = at::cat({own.row(), at::tensor({static_cast<double>(code)}, at::kDouble)});
  dist::all_reduce(all, c10d::ReduceOp::MAX);
  if (damage) std::rethrow_exception(damage);
  if (const int other = all[-1].item<int>(); other != base::kExitOk) throw QuietExit{other};
  return Wishes::of_row(all);
}

/// Concatenates the values of all tensors on the options' device.
at::Tensor joined(const std::vector<at::Tensor>& tensors, const at::TensorOptions& options) {
  std::vector<at::Tensor> flat{at::empty({0}, options)};
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.flatten().to(options.device()));
  return at::cat(flat);
}

/// Copies vectors with elements of 8 bytes to the host: one copy and one wait for the device.
std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& vectors) {
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& one : vectors) bytes.push_back(one.view(at::kByte));
  const at::Tensor all = at::cat(bytes).cpu();
  std::vector<at::Tensor> copies;
  int64_t begin = 0;
  for (const at::Tensor& one : vectors) {
    const auto size = static_cast<int64_t>(one.nbytes());
    copies.push_back(all.narrow(0, begin, size).view(one.scalar_type()));
    begin += size;
  }
  return copies;
}

}  // namespace

data::Loader each_once(const std::shared_ptr<const data::Dataset>& set, data::LoaderOptions options,
                       int64_t num_replicas, int64_t rank) {
  options.drop_last = false;
  if (set->sizes_vary()) options.batch_size = 1;
  data::Loader loader(
      set, std::make_shared<data::SequentialShardSampler>(set->size(), num_replicas, rank),
      options);
  loader.start_epoch(0);
  return loader;
}

Evaluator::Evaluator(const Config& config, const Inputs& inputs, models::Model& model,
                     const BatchToDevice& to_device, const data::LoaderOptions& loader_options)
    : config_(config),
      inputs_(inputs),
      model_(model),
      task_(make_task(config, *inputs.eval_set, model)),
      added_(report_on_rank_0([&] { return AddedMetrics(config, *inputs.eval_set); })),
      to_device_(to_device),
      loader_options_(loader_options) {
  if (task_->evaluates_one_by_one()) loader_options_.batch_size = 1;
  loader_options_.sample_name = to_string(inputs.eval_split) + " sample";
}

Evaluation Evaluator::evaluate(const GetWishes& wishes, const OnBatch& on_batch,
                               Pictures pictures) const {
  const at::NoGradGuard no_grad;
  model_.eval();
  data::Loader loader =
      each_once(inputs_.eval_set, loader_options_, dist::world_size(), dist::rank());
  loader.set_damaged(damaged_);
  const at::Device device = dist::device();
  // The task's counts, followed by those of the added metrics.
  at::Tensor counts = at::zeros({task_->num_counts() + added_.num_counts()},
                                at::TensorOptions(at::kLong).device(device));
  std::vector<at::Tensor> records;
  std::vector<at::Tensor> verdicts;
  std::vector<int64_t> samples;  // of the verdicts
  std::vector<Task::Seen> seen;
  std::optional<WorstSamples> worst;
  if (pictures == Pictures::kFirstAndWorst) worst.emplace(*task_);
  int64_t to_see = pictures == Pictures::kNone ? 0 : task_->pictured_samples();
  // Sum and number of losses, samples, samples left out.
  at::Tensor sums = at::zeros({4}, at::TensorOptions(at::kDouble).device(device));
  const Wishes all_wishes = run_and_share_wishes([&] {
    // A rank that is to stop skips its other batches: the results are not used then.
    for (int64_t done = 0;; ++done) {
      const Wishes own = wishes();
      if (own.ends_run()) return own;
      on_batch(done, loader.num_batches());
      const auto batch = blaming([&] { return component_name("data", config_.data); },
                                 [&] { return loader.next(); });
      if (!batch) return Wishes{};
      if (batch->size() == 0) continue;  // all its samples are damaged
      const Autocast autocast(config_, device);
      const data::Batch on_device = to_device_(*batch);
      const auto outputs = blaming([&] { return model_name(config_, on_device.data); },
                                   [&] {
                                     auto made = task_->forward(model_, /*turn=*/0, on_device);
                                     check_defined(made);
                                     return full_precision(std::move(made));
                                   });
      const at::Tensor& target = on_device.target;
      const at::Tensor added = added_.counts(outputs, target);
      blaming([&] { return task_name(config_, outputs, target); },
              [&] {
                const at::Tensor loss = task_->loss_sum(outputs, target);
                sums.narrow(0, 0, 2).add_(loss);
                if (worst) worst->add(on_device, outputs, loss);
                sums[2].add_(batch->size());
                counts.add_(at::cat({task_->counts(outputs, target), added}));
                records.push_back(task_->records(outputs, target));
                if (const at::Tensor own = task_->verdicts(outputs, target); own.defined()) {
                  verdicts.push_back(own);
                  samples.insert(samples.end(), batch->indices.begin(), batch->indices.end());
                }
              });
      if (to_see > 0) seen.push_back(some_of(on_device, outputs, 0, to_see));
      to_see -= batch->size();
    }
  });
  sums[3].fill_(loader.skipped());
  damaged_ = loader.damaged();
  // One all-reduce and one wait for the device. Counts below 2^53 are exact in float64.
  at::Tensor of_all_ranks = at::cat({sums, counts.to(at::kDouble)});
  dist::all_reduce(of_all_ranks);
  const auto host =
      on_host({of_all_ranks, joined(records, counts.options()), joined(verdicts, sums.options())});
  dist::throw_if_aborted();  // the sums are undefined then
  const at::Tensor& all = host[0];
  const double* const values = all.const_data_ptr<double>();
  report_on_rank_0([&] {
    data::check_skipped(loader_options_, static_cast<int64_t>(values[3]), inputs_.eval_set->size());
  });
  const double* const added = values + sums.numel() + task_->num_counts();
  const std::vector<int64_t> all_counts(values + sums.numel(), added);
  const std::vector<int64_t> all_records =
      gathered(std::span(host[1].const_data_ptr<int64_t>(), static_cast<size_t>(host[1].numel())));
  std::vector<Metric> metrics = task_->metrics(all_counts, all_records);
  std::ranges::move(added_.metrics(std::vector<int64_t>(added, values + all.numel())),
                    std::back_inserter(metrics));
  return {.loss = values[0] / std::max(values[1], 1.0),
          .metrics = std::move(metrics),
          .remark = task_->remark(all_counts, all_records),
          .tables = task_->tables(all_counts, all_records),
          .seen = std::move(seen),
          .worst = worst ? worst->take() : std::vector<Task::Seen>(),
          .mistakes = worst_mistakes(host[2], samples),
          .samples = static_cast<int64_t>(values[2]),
          .skipped = static_cast<int64_t>(values[3]),
          .wishes = all_wishes};
}

void Evaluator::write(const Evaluation& evaluation, const std::string& prefix, int64_t step,
                      RunFolder& folder) const {
  for (const Table& table : evaluation.tables) {
    folder.replace_file(prefix + table.name, table.text);
  }
  const data::Normalization normalization = inputs_.eval_set->normalization();
  const auto write_pictures = [&](const std::string& before,
                                  const std::vector<Task::Seen>& samples) {
    for (const Picture& picture : task_->pictures(samples, normalization)) {
      folder.write_picture(before + picture.name, step, picture.image);
    }
  };
  write_pictures(prefix, evaluation.seen);
  if (!evaluation.worst.empty()) write_pictures(prefix + "worst_", evaluation.worst);
  if (prefix.empty()) write_mistakes(evaluation.mistakes, folder);
}

/// Writes mistakes.csv, and mistakes.png with their images in the same order.
void Evaluator::write_mistakes(const std::vector<Mistake>& mistakes, RunFolder& folder) const {
  const data::Dataset& set = *inputs_.eval_set;
  // The mistakes of an earlier evaluation have to be replaced.
  if (mistakes.empty() && !base::exists(folder.path() / "mistakes.csv")) return;
  const auto name_of = [&](int64_t sample) {
    const auto* const samples = dynamic_cast<const data::SampleDataset*>(&set);
    return samples != nullptr ? samples->name_of(sample) : "";
  };
  folder.replace_file("mistakes.csv", mistakes_table(mistakes, set.class_names(), name_of));
  if (mistakes.empty()) return;
  std::vector<int64_t> samples;
  for (const Mistake& mistake : mistakes) samples.push_back(mistake.sample);
  const auto sheet = contact_sheet(to_device_(set.get_batch(samples)), set.normalization());
  if (sheet) folder.replace_file("mistakes.png", data::encode_png(*sheet));
}

void prepare_statistics(const Config& config, const Inputs& inputs, const Task& task,
                        models::Model& model, const BatchToDevice& to_device,
                        const data::LoaderOptions& loader_options, int64_t seed,
                        const GetWishes& wishes) {
  if (config.update_bn_stats > 0) {
    set_training(config, model);
    data::Loader loader(inputs.train_set, inputs.make_sampler(seed), loader_options);
    const int64_t batches = std::min(config.update_bn_stats, loader.num_batches());
    loader.start_epoch(0);
    bool ends = false;
    dist::update_bn_stats(
        model,
        [&](int64_t) {
          if (ends) return;
          std::optional<data::Batch> batch;
          ends = run_and_share_wishes([&] {
                   batch = loader.next();
                   return wishes();
                 }).ends_run();
          const Autocast autocast(config, dist::device());
          // A rank with an empty batch still takes part in the exchange of statistics.
          const bool counts = batch && (batch->size() > 0 || config.sync_batchnorm);
          if (!counts || ends) return;
          try {
            task.forward(model, /*turn=*/0, to_device(*batch));
          } catch (const std::exception& error) {
            if (!became_too_small(config, error)) throw;
          }
        },
        batches);
  }
  if (config.distribute_bn != "none") {
    dist::distribute_bn(model, config.distribute_bn == "reduce");
  }
}

}  // namespace syncbn::train
