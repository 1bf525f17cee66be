#include "commands/commands.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoints/saved_network.h"
#include "common/config_keys.h"
#include "common/rank_0.h"
#include "evaluation.h"
#include "records/progress.h"
#include "start_report.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

constexpr size_t kShownResults = 40;  // of an evaluation, in the log; the line of JSON has all

/// Other data settings, such as another size of images, give other results.
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

/// Labels are numbers: in another order they stand for other classes.
void warn_of_other_classes(const Checkpoint& checkpoint, const std::string& path,
                           const std::vector<std::string>& classes) {
  const auto [own, other] = std::ranges::mismatch(checkpoint.classes, classes);
  if (own == checkpoint.classes.end() || other == classes.end()) return;
  spdlog::warn("{} was trained with other classes: its class {} is '{}', and this data's is '{}'",
               path, own - checkpoint.classes.begin(), base::printable(*own),
               base::printable(*other));
}

/// Finds before the evaluation what would keep its tables from being written.
void check_tables(const Task& task, const std::string& type, const fs::path& folder) {
  const std::vector<int64_t> none(static_cast<size_t>(task.num_counts()));
  const std::vector<Table> tables = task.tables(none, {});
  if (tables.empty()) {
    throw base::UserError(fmt::format("--tables: task {} has none; leave the option out", type));
  }
  for (const Table& table : tables) base::check_can_write(folder / table.name);
}

}  // namespace

int evaluate_checkpoint(const Config& config, const std::string& name, const Inputs& inputs,
                        const fs::path& tables) {
  const SavedNetwork network("eval", config, name);
  const std::string& path = network.path();
  const auto model = make_model(config, *inputs.eval_set, config.seed.value_or(0));
  const data::LoaderOptions loader_options =
      config.loader.options(inputs.batch_size, dist::device());
  const BatchToDevice to_device =
      batch_to_device(config, *model, *inputs.eval_set, loader_options.pin_memory);
  const Evaluator evaluator(config, inputs, *model, to_device, loader_options);
  if (!tables.empty())
    do_on_rank_0([&] { check_tables(evaluator.task(), config.task.type(), tables); });
  const std::string split = to_string(inputs.eval_split);
  AgentChannel channel(dist::rank());
  Progress progress(channel);
  // JSON is UTF-8; the name of a file may be anything.
  nlohmann::ordered_json json = {{"checkpoint", base::printable(path)}, {"split", split}};
  std::string text;
  std::string remark;
  const auto evaluate = [&](const std::string& prefix) {
    const Evaluation result =
        evaluator.evaluate([] { return Wishes{}; },
                           [&](int64_t batch, int64_t batches) {
                             if (is_rank_0())
                               progress.show(batch, batches, [&] { return prefix + split; });
                           });
    if (is_rank_0()) progress.clear();
    json["samples"] = result.samples;
    json[prefix + "loss"] = result.loss;
    std::vector<std::string> parts = {fmt::format("{}loss {}", prefix, shown({}, result.loss))};
    for (const Metric& metric : result.metrics) {
      json[prefix + metric.name] = metric.value;
      if (std::isnan(metric.value)) continue;
      parts.push_back(fmt::format("{}{} {}", prefix, metric.name, shown(metric, metric.value)));
    }
    text += "  " + base::join_some(parts, "  ", kShownResults);
    if (!result.remark.empty()) remark = result.remark;
    if (tables.empty()) return;
    do_on_rank_0([&] {
      for (const Table& table : result.tables) {
        base::write_file_atomically(tables / (prefix + table.name), table.text);
      }
    });
  };
  if (is_rank_0()) {
    warn_of_remarks({inputs.eval_set}, config.loader.on_error == "skip");
    warn_of_survey(*inputs.eval_set, inputs.eval_split);
  }
  if (network.checkpoint() != nullptr && is_rank_0()) {
    warn_of_other_data(*network.checkpoint(), path, config);
    warn_of_other_classes(*network.checkpoint(), path, inputs.eval_set->class_names());
  }
  network.load_into(*model);
  evaluate("");
  if (network.has_average()) {
    network.load_into(*model, /*average=*/true);
    evaluate(kAverage);
  }
  if (!is_rank_0()) return base::kExitOk;
  spdlog::info("{} on {}:{}", path,
               base::counted(json["samples"].get<int64_t>(), split + " sample"), text);
  if (!remark.empty()) spdlog::info("{}", remark);
  if (::isatty(STDOUT_FILENO) != 1) base::write_stdout(json.dump() + "\n");
  return base::kExitOk;
}

}  // namespace syncbn::train
