#include "eval.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/checkpoint.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "agreement.h"
#include "evaluation.h"
#include "model.h"
#include "rank_0.h"
#include "run_folder.h"
#include "sealed_archive.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// Gives all ranks the weights in a file of Python's.
void load_python_weights(const std::string& path, models::Model& model) {
  do_on_rank_0([&] {
    const models::StateDict weights = models::read_state_dict(path);
    try {
      models::load_state_dict(model, weights);
    } catch (const base::UserError& error) {
      throw base::UserError(fmt::format("cannot evaluate {}: {}", path, error.what()));
    }
  });
  for (const auto& item : models::state_dict(model)) {
    at::Tensor tensor = item.value().detach();
    dist::broadcast(tensor, 0);
  }
}

/// Images of another size, for one, give other results.
void warn_of_other_data(const Checkpoint& checkpoint, const std::string& path,
                        const Config& config) {
  std::vector<std::string> changed;
  const config::Value former = config::parse_yaml(checkpoint.config, path);
  for (const config::Change& change :
       config::changes(former, config::Schema<Config>::get().write(config))) {
    const std::string& key = change.path;
    if (key.starts_with("data.") && !may_differ(key)) changed.push_back(change.str());
  }
  if (changed.empty()) return;
  spdlog::warn("{} was made with other data; this evaluation has {}", path,
               base::join(changed, ", "));
}

}  // namespace

fs::path checkpoint_file(const std::string& command, const Config& config,
                         const std::string& name) {
  if (!config.resume.empty() && config.resume != "auto") return config.resume;
  const fs::path folder = RunFolder::newest(config.run_dir, name);
  std::error_code ignored;
  for (const char* file : {RunFolder::kBest, RunFolder::kLast}) {
    if (fs::exists(folder / file, ignored)) return folder / file;
  }
  throw base::UserError(fmt::format(
      "{}: {} has no checkpoint; name a file with --resume, or a run's folder with --run_dir",
      command, folder.string()));
}

int evaluate_checkpoint(const Config& config, const std::string& name, const Inputs& inputs) {
  std::string path;
  const std::string bytes = on_rank_0([&] {
    path = checkpoint_file("eval", config, name).string();
    std::string all = base::read_file(path);
    return is_of_python(all) ? "" : all;
  });
  const auto model = make_model(config, *inputs.eval_set, config.seed.value_or(0));
  const auto task = config.task.make(*inputs.eval_set);
  const BatchToDevice to_device = batch_to_device(config, *model, *inputs.eval_set);
  const Evaluator evaluator(config, inputs, *task, to_device,
                            config.loader.options(inputs.batch_size));
  const std::string split = to_string(inputs.eval_split);
  nlohmann::ordered_json json = {{"checkpoint", path}, {"split", split}};
  std::string text;
  std::string remark;
  const auto evaluate = [&](const std::string& prefix) {
    const Evaluation result = evaluator.evaluate(*model, [] { return Wishes{}; });
    json["samples"] = result.samples;
    json[prefix + "loss"] = result.loss;
    text += fmt::format("  {}loss {:.4f}", prefix, result.loss);
    for (const Metric& metric : result.metrics) {
      json[prefix + metric.name] = metric.value;
      if (std::isnan(metric.value)) continue;
      text += fmt::format("  {}{} {}", prefix, metric.name, shown(metric, metric.value));
    }
    if (!result.remark.empty()) remark = result.remark;
  };
  if (bytes.empty()) {
    load_python_weights(path, *model);
    evaluate("");
  } else {
    const Checkpoint checkpoint = report_on_rank_0([&] { return parse_checkpoint(bytes, path); });
    if (is_rank_0()) warn_of_other_data(checkpoint, path, config);
    const auto load = [&](const Checkpoint::Tensors& network) {
      report_on_rank_0([&] {
        try {
          load_model(network, *model);
        } catch (const base::UserError& error) {
          throw base::UserError(fmt::format("cannot evaluate {}: {}", path, error.what()));
        }
      });
    };
    load(checkpoint.model);
    evaluate("");
    if (!checkpoint.ema.empty()) {
      load(checkpoint.ema);
      evaluate(kAverage);
    }
  }
  if (!is_rank_0()) return base::kExitOk;
  spdlog::info("{} on {}:{}", path,
               base::counted(json["samples"].get<int64_t>(), split + " sample"), text);
  if (!remark.empty()) spdlog::info("{}", remark);
  base::write_stdout(json.dump() + "\n");
  return base::kExitOk;
}

}  // namespace syncbn::train
