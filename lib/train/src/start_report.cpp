#include "start_report.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/dist/kept_random_state.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <exception>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/rank_0.h"
#include "step/model.h"
#include "step/training_step.h"

namespace syncbn::train {
namespace {

constexpr size_t kShownClasses = 10;

void describe_classes(const data::Dataset& set) {
  std::vector<std::string> names = set.class_names();
  if (names.empty()) return;
  const std::string count = base::counted(std::ssize(names), "class");
  for (std::string& name : names) name = base::printable(name);
  spdlog::info("{}: {}", count, base::join_some(std::move(names), ", ", kShownClasses));
}

void describe_frozen(const models::Model& model) {
  int64_t frozen = 0;
  int64_t all = 0;
  for (const at::Tensor& parameter : model.parameters()) {
    all += parameter.numel();
    if (!parameter.requires_grad()) frozen += parameter.numel();
  }
  spdlog::info("{} of {} parameters are frozen", frozen, all);
}

std::string precision_part(const Config& config) {
  const at::ScalarType type = chosen_precision(config, dist::device());
  return type == at::kBFloat16 ? ", bf16" : type == at::kHalf ? ", fp16" : "";
}

/// The keys that are set although only GPUs use them.
std::vector<std::string> gpu_keys(const Config& config) {
  const auto text_of = [](const NcclConfig& nccl) {
    return config::to_yaml(config::Schema<NcclConfig>::get().write(nccl));
  };
  const std::pair<const char*, bool> keys[] = {
      {"tf32", config.tf32},
      {"cudnn_benchmark", config.cudnn_benchmark.value == true},
      {"loader.pin_memory", config.loader.pin_memory.value == true},
      {"nccl", text_of(config.nccl) != text_of({})},
  };
  std::vector<std::string> set;
  for (const auto& [key, is_set] : keys) {
    if (is_set) set.emplace_back(key);
  }
  return set;
}

}  // namespace

bool warn_of_remarks(const std::vector<std::shared_ptr<const data::Dataset>>& sets, bool skips,
                     bool reads_all) {
  bool has_fault = false;
  std::set<std::string> shown;  // held-out samples are of the training set
  for (const auto& set : sets) {
    for (const auto& [text, is_fault, unreadable] : set->remarks()) {
      if (reads_all && !unreadable.empty()) continue;
      has_fault = has_fault || is_fault;
      if (shown.insert(text).second)
        spdlog::warn("{}{}", is_fault && skips ? "left out: " : "", text);
    }
  }
  return has_fault;
}

void warn_of_survey(const data::Dataset& set, data::Split split, std::chrono::milliseconds limit,
                    const std::string& name) {
  for (const std::string& line : data::survey(set, split, limit, name)) spdlog::warn("{}", line);
}

void check_plan(const Config& config, const Inputs& inputs, const data::Loader& loader,
                int64_t ranks, const Schedule& schedule, int64_t steps, int64_t remaining,
                models::Model& model) {
  if (const double warmup = schedule.warmup_steps(); is_rank_0() && warmup > 0 && warmup >= steps) {
    spdlog::warn(
        "schedule.warmup takes {:.0f} steps and the run {}: the learning rate rises until the end; "
        "lower schedule.warmup, or raise epochs or max_steps",
        warmup, steps);
  }
  const bool syncs = config.sync_batchnorm;
  if (syncs && config.sync_batchnorm_group.value_or(ranks) > 1) return;
  const int64_t batch = inputs.batch_size;
  const int64_t replicas = syncs ? 1 : std::max<int64_t>(std::ssize(config.parallel.devices), 1);
  const int64_t parts = config.accumulate * replicas;
  const int64_t least = 2 * parts;  // samples that give each part two
  const int64_t samples = loader.num_samples();
  const int64_t left = samples % batch;
  const bool is_in_all = std::min(batch, samples) < least;
  const bool is_in_last =
      !is_in_all && left > 0 && left < least && remaining >= loader.num_batches();
  if (!(is_in_all && remaining > 0) && !is_in_last) return;
  const at::NoGradGuard no_grad;
  const at::Tensor buffers = packed_buffers(model);
  const dist::detail::KeptRandomState random_state(dist::device());  // of dropout
  set_training(config, model);
  try {
    model.forward(at::zeros(inputs.train_set->sample_shape(), dist::device()).unsqueeze(0));
  } catch (const std::exception& error) {
    if (is_of_one_value(error)) {  // any other error is the first step's
      std::string key = "batch_size";
      std::string advice =
          fmt::format("give each rank at least {} in a step", base::counted(least, "sample"));
      if (is_in_last) {
        key = "loader.drop_last";
        advice = "set loader.drop_last=true, or another batch_size";
      } else if (config.accumulate > 1) {
        key = "accumulate";
        advice = "set accumulate=1, or another batch_size";
      }
      if (!syncs && ranks * replicas > 1) advice += ", or sync_batchnorm=true";
      throw base::UserError(fmt::format(
          "{}: {}{} in batches of {} {}{}, and batch norm of this network cannot train on a "
          "single sample; {}",
          key, base::counted(samples, "training sample"), ranks > 1 ? " per rank" : "", batch,
          is_in_all ? "leave single samples" : fmt::format("leave a last batch of {}", left),
          parts > 1 ? fmt::format(" in {} parts", parts) : "", advice));
    }
  }
  load_buffers(buffers, model);
}

void report_start(const Config& config, const std::string& name, const Inputs& inputs,
                  const models::Model& model, int64_t seed) {
  const data::Dataset& set = *inputs.train_set;
  const bool has_gpu = dist::device().is_cuda();
  const size_t replicas = config.parallel.devices.size();
  const std::string norm = config.sync_batchnorm ? "SyncBatchNorm"
                                                 : fmt::format("batch norm of each {}",
                                                               replicas > 0 ? "replica" : "rank");
  const int64_t ranks = dist::world_size();
  spdlog::info("{}: {} training and {} {} samples, {} x batch {}{}{}, {}, {}{}", name, set.size(),
               inputs.eval_set->size(), to_string(inputs.eval_split), base::counted(ranks, "rank"),
               inputs.batch_size, ranks > 1 ? fmt::format(" = {}", ranks * inputs.batch_size) : "",
               replicas > 0 ? fmt::format(" over {}", base::counted(replicas, "replica")) : "",
               norm, has_gpu ? "GPU" : "CPU", precision_part(config));
  describe_classes(set);
  warn_of_remarks({inputs.train_set, inputs.eval_set}, config.loader.on_error == "skip");
  warn_of_survey(set, data::Split::kTrain);
  warn_of_survey(*inputs.eval_set, inputs.eval_split);
  if (inputs.eval_split == data::Split::kTest && config.checkpoint.keep_best.count > 0) {
    spdlog::info("no validation data: best.pt is chosen on the test split (see val_fraction)");
  }
  if (config.amp == "fp16" && !has_gpu) {
    spdlog::warn("amp: fp16 is many times slower than float32 on CPUs; bf16 is quicker");
  }
  const int64_t samples = inputs.make_sampler(seed)->size();
  if (inputs.batch_size > samples) {
    spdlog::warn("a batch of {} is more than the {} of a rank: an epoch is one step",
                 inputs.batch_size, base::counted(samples, "sample"));
  }
  const std::vector<std::string> idle = has_gpu ? std::vector<std::string>() : gpu_keys(config);
  if (!idle.empty()) {
    spdlog::warn("{} change{} nothing: this run has no GPU", base::join(idle, ", "),
                 idle.size() == 1 ? "s" : "");
  }
  if (!config.freeze.empty()) describe_frozen(model);
}

}  // namespace syncbn::train
