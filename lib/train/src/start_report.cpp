#include "start_report.h"

#include <fmt/format.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/dist/process_group.h>

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "step/training_step.h"

namespace syncbn::train {
namespace {

constexpr size_t kShownClasses = 10;
constexpr std::chrono::milliseconds kSurveyTime{500};  ///< for each split, before the first step

void describe_classes(const data::Dataset& set) {
  std::vector<std::string> names = set.class_names();
  if (names.empty()) return;
  const std::string count = names.size() == 1 ? "1 class" : fmt::format("{} classes", names.size());
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

bool warn_of_remarks(const std::vector<std::shared_ptr<const data::Dataset>>& sets) {
  bool has_fault = false;
  std::set<std::string> shown;  // held-out samples are of the training set
  for (const auto& set : sets) {
    for (const auto& [text, is_fault] : set->remarks()) {
      has_fault = has_fault || is_fault;
      if (shown.insert(text).second) spdlog::warn("{}{}", is_fault ? "left out: " : "", text);
    }
  }
  return has_fault;
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
  warn_of_remarks({inputs.train_set, inputs.eval_set});
  for (const auto& [split, files] : {std::pair(data::Split::kTrain, inputs.train_set),
                                     std::pair(inputs.eval_split, inputs.eval_set)}) {
    for (const auto& line : data::survey(*files, split, kSurveyTime)) spdlog::warn("{}", line);
  }
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
