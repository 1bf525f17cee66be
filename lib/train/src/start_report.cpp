#include "start_report.h"

#include <fmt/format.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <vector>

#include "step/training_step.h"

namespace syncbn::train {
namespace {

constexpr size_t kShownClasses = 10;

void describe_classes(const data::Dataset& set) {
  std::vector<std::string> names = set.class_names();
  if (names.empty()) return;
  const std::string count = names.size() == 1 ? "1 class" : fmt::format("{} classes", names.size());
  const bool is_long = names.size() > kShownClasses;
  names.resize(std::min(names.size(), kShownClasses));
  for (std::string& name : names) name = base::printable(name);
  spdlog::info("{}: {}{}", count, base::join(names, ", "), is_long ? ", …" : "");
}

std::string precision_part(const Config& config) {
  switch (chosen_precision(config, dist::device())) {
    case at::kBFloat16:
      return ", bf16";
    case at::kHalf:
      return ", fp16";
    default:
      return "";
  }
}

}  // namespace

void report_start(const Config& config, const std::string& name, const Inputs& inputs,
                  int64_t seed) {
  const data::Dataset& set = *inputs.train_set;
  const bool has_gpu = dist::device().is_cuda();
  const size_t replicas = config.parallel.devices.size();
  const std::string norm = config.sync_batchnorm ? "SyncBatchNorm"
                                                 : fmt::format("batch norm of each {}",
                                                               replicas > 0 ? "replica" : "rank");
  spdlog::info("{}: {} training and {} {} samples, {} x batch {}{}, {}, {}{}", name, set.size(),
               inputs.eval_set->size(), to_string(inputs.eval_split),
               base::counted(dist::world_size(), "rank"), inputs.batch_size,
               replicas > 0 ? fmt::format(" over {}", base::counted(replicas, "replica")) : "",
               norm, has_gpu ? "GPU" : "CPU", precision_part(config));
  describe_classes(set);
  for (const std::string& unreadable : {set.unreadable(), inputs.eval_set->unreadable()}) {
    if (!unreadable.empty()) {
      spdlog::warn("{} cannot be read: left out where they come (see loader.error_budget)",
                   unreadable);
    }
  }
  if (inputs.eval_split == data::Split::kTest) {
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
  if (config.loader.pin_memory.value == true && !has_gpu) {
    spdlog::warn("loader.pin_memory changes nothing: this run has no GPU");
  }
}

}  // namespace syncbn::train
