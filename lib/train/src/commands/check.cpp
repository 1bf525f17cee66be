#include "commands/commands.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/data/subset.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/inputs.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include "commands/program_options.h"
#include "commands/resolved_config.h"
#include "common/component_error.h"
#include "evaluation.h"
#include "records/progress.h"
#include "run_plan.h"
#include "start_report.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

/// For each split: files are read once more, most of them from the page cache.
constexpr std::chrono::minutes kSurveyTime{1};

/// Makes a check skip what it cannot read, and read all of each file: a crop as the first transform
/// would decode only a part of an image.
Config for_reading(const Config& config) {
  config::Value all = config::Schema<Config>::get().write(config);
  config::Value whole = config::Value::of_map();
  whole.set("type", config::Value::of_scalar("random_horizontal_flip"));
  whole.set("p", config::Value::of_scalar("0"));
  for (const char* key : {"transforms", "test_transforms"}) {
    config::Value* const steps = all.find("data")->find(key);
    if (steps == nullptr || steps->list.empty()) continue;
    const config::Value* const first = steps->list.front().find("type");
    if (first == nullptr || first->scalar.find("crop") == std::string::npos) continue;
    steps->list.insert(steps->list.begin(), whole);
  }
  Config changed;
  config::Faults faults;
  config::Schema<Config>::get().read(all, changed, "", faults);
  faults.throw_if_any();
  changed.loader.on_error = "skip";
  if (!ranks_of_job()) changed.sync_batchnorm_group.reset();  // it is for a run of more ranks
  return changed;
}

/// The samples of each class; none if the labels are not known.
std::vector<int64_t> class_counts(const data::Dataset& set) {
  if (set.labels().empty()) return {};
  std::vector<int64_t> counts(static_cast<size_t>(set.num_classes()));
  for (const int64_t label : set.labels()) {
    if (label >= 0 && label < set.num_classes()) ++counts[static_cast<size_t>(label)];
  }
  return counts;
}

/// ", 3 classes, from 12 (cat) to 40 (dog) samples each"; nothing if the labels are not known.
std::string classes_text(const data::Dataset& set) {
  const std::vector<int64_t> counts = class_counts(set);
  if (counts.empty()) return "";
  const auto names = set.class_names();
  const auto text = [&](auto place) {
    const auto label = static_cast<size_t>(place - counts.begin());
    return fmt::format(
        "{} ({})", *place,
        label < names.size() ? base::printable(names[label]) : std::to_string(label));
  };
  const auto [least, most] = std::ranges::minmax_element(counts);
  const std::string classes = base::counted(std::ssize(counts), "class");
  if (*least == *most) return fmt::format(", {} of {}", classes, base::counted(*least, "sample"));
  return fmt::format(", {}, from {} to {} samples each", classes, text(least), text(most));
}

/// Samples that cannot be used for the same reason.
struct Cause {
  std::string shown;       ///< the line to print
  std::string shown_name;  ///< the sample that it names
  std::vector<std::string> others;
};

/// Warns of samples that cannot be used, in one line for each cause: the remark that names their
/// files, or a fault, whatever names and numbers it has.
/// @param explained receives the texts of these remarks
void warn_of_damaged(const data::Dataset& set, const std::map<int64_t, std::string>& damaged,
                     std::set<std::string>& explained) {
  constexpr size_t kShown = 5;
  static const std::regex kNamesAndNumbers(R"(\([^)]*\)|'[^']*'|[^ ]*/[^ ]*|[0-9][0-9, x]*)");
  const std::vector<data::Remark> remarks = set.remarks();
  std::map<std::string, Cause> causes;
  for (const auto& [index, text] : damaged) {
    const std::string name = dynamic_cast<const data::SampleDataset&>(set).name_of(index);
    // The file that the fault names: the sample's, or its mask.
    const size_t begin = text.find('\'') + 1;  // 0 without any
    const std::string file = text.substr(begin, text.find('\'', begin) - begin);
    const auto remark = std::ranges::find_if(remarks, [&](const data::Remark& one) {
      return one.unreadable.contains(file) || one.unreadable.contains(name);
    });
    const bool has_remark = remark != remarks.end();
    if (has_remark) explained.insert(remark->text);
    // The file that a remark shows may be of the split that was held out.
    const std::string& known = has_remark && remark->unreadable.contains(file) ? file : name;
    const bool is_shown = has_remark && remark->text.find("'" + known + "'") != std::string::npos;
    Cause& cause =
        causes[has_remark ? remark->text : std::regex_replace(text, kNamesAndNumbers, "")];
    if (cause.shown.empty() || is_shown) {
      cause.shown = is_shown ? remark->text : "cannot be used: " + text;
      std::string earlier = std::exchange(cause.shown_name, name);
      if (!earlier.empty()) cause.others.push_back(std::move(earlier));
    } else {
      cause.others.push_back(name);
    }
  }
  for (const auto& [key, cause] : causes) {
    const std::string more = base::printable(base::join_some(cause.others, ", ", kShown));
    spdlog::warn("{}{}", cause.shown,
                 more.empty() ? "" : fmt::format("; {} more: {}", cause.others.size(), more));
  }
}

/// Reads a split, prints a line about it, and warns of what cannot be used and what looks wrong.
/// @param explained as for warn_of_damaged()
/// @return the number of samples that cannot be used
int64_t check_split(data::Split split, const std::shared_ptr<const data::Dataset>& set,
                    const Config& config, Progress& progress, std::set<std::string>& explained) {
  const std::string name = to_string(split);
  data::LoaderOptions options = config.loader.options(config.local_batch_size(1), at::kCPU);
  options.on_error = data::LoaderOptions::OnError::kCollect;
  data::Loader loader = each_once(set, options, /*num_replicas=*/1, /*rank=*/0);
  const int64_t batches = loader.num_batches();
  std::vector<int64_t> usable;
  for (int64_t done = 1; const auto batch = loader.next(); ++done) {
    usable.insert(usable.end(), batch->indices.begin(), batch->indices.end());
    progress.show(done, batches, [&] { return "check " + name; });
  }
  progress.clear();
  const int64_t bad = std::ssize(loader.damaged());
  base::write_stdout(
      fmt::format("{}: {}{}; {}\n", name, base::counted(set->size(), "sample"), classes_text(*set),
                  bad == 0 ? "all can be read" : fmt::format("{} cannot be used", bad)));
  warn_of_damaged(*set, loader.damaged(), explained);
  warn_of_survey(bad == 0 ? *set : *data::subset(set, usable), split, kSurveyTime,
                 bad == 0 ? "" : name + ", of what can be used");
  return bad;
}

/// Measured: configs/images.yaml with 20 drawings of each of three shapes ends at 93 % in training
/// and 36 % on others; other scales of its crops do not help.
void advise_weights(const Config& config, const data::Dataset& set) {
  constexpr int64_t kFew = 100;
  const std::vector<int64_t> counts = class_counts(set);
  if (!config.init.empty() || counts.empty() || std::ranges::min(counts) >= kFew) return;
  spdlog::info(
      "{} of a class may be too few for a network that begins with random weights; begin with "
      "trained ones (init=FILE)",
      base::counted(std::ranges::min(counts), "training sample"));
}

/// Checks what a run would check at its start, before what takes long. Without a launcher, only
/// warns of batches of one: more ranks divide the samples differently.
void check_start(const Config& config, const Inputs& inputs) {
  dist::init_process_group({.backend = "gloo", .rank = 0, .world_size = 1});
  Config alone = config;
  alone.sync_batchnorm_group.reset();  // the other ranks do not form groups
  const auto model = make_model(alone, *inputs.train_set, config.seed.value_or(0));
  init_model(config, *model);
  for (const auto& set : {inputs.train_set, inputs.eval_set}) make_task(config, *set, *model);
  const data::Loader loader(inputs.train_set, inputs.make_sampler(0),
                            config.loader.options(inputs.batch_size, at::kCPU));
  const int64_t batches = std::max<int64_t>(loader.num_batches(), 1);
  const int64_t steps =
      RunPlan(config, loader, Checkpoint()).total_steps_after(config.start_epoch * batches);
  const ScheduleArgs args{.epochs = config.epochs, .steps_per_epoch = batches};
  const auto schedule = refusing([&] { return component_name("schedule", config.schedule); },
                                 [&] { return config.schedule.make(args); });
  try {
    const int64_t ranks = ranks_of_job().value_or(1);
    check_plan(config, inputs, loader, ranks, *schedule, steps, steps, *model);
  } catch (const base::UserError& mistake) {
    if (ranks_of_job()) throw;
    spdlog::warn("on one rank: {}", mistake.what());
  }
}

}  // namespace

int check(const std::vector<std::string>& args) {
  config::Faults faults;
  const auto line = parse_arguments("check", args, faults);
  const ResolvedConfig resolved = resolve_config(line, faults);
  const Config config = for_reading(resolved.config);
  Inputs inputs;
  with_place(resolved,
             [&] { inputs = load_inputs(config, /*rank=*/0, ranks_of_job().value_or(1)); });
  check_start(config, inputs);
  AgentChannel channel(/*rank=*/0);
  Progress progress(channel);
  int64_t bad = 0;
  std::vector<std::shared_ptr<const data::Dataset>> sets;
  std::set<std::string> explained;  // remarks whose files a warning has named
  double budget = 0;                // that a run would need; 0: the configured one suffices
  const auto check_set = [&](data::Split split, const std::shared_ptr<const data::Dataset>& set) {
    const int64_t found = check_split(split, set, config, progress, explained);
    bad += found;
    sets.push_back(set);
    if (found <= data::max_skipped(resolved.config.loader.options(1, at::kCPU), set->size()))
      return;
    budget = std::max(budget, static_cast<double>(found) / static_cast<double>(set->size()));
  };
  check_set(data::Split::kTrain, inputs.train_set);
  check_set(inputs.eval_split, inputs.eval_set);
  if (inputs.has_test_set && inputs.eval_split != data::Split::kTest) {
    check_set(data::Split::kTest, config.data.make(data::Split::kTest));
  }
  advise_weights(config, *inputs.train_set);
  const bool raises = resolved.config.loader.on_error != "skip";
  bool has_fault = warn_of_remarks(sets, !raises, /*reads_all=*/true);
  // A run would read such a remark too, though reading found no fault in its files.
  for (const auto& set : sets) {
    for (const data::Remark& remark : set->remarks()) {
      if (remark.unreadable.empty() || !explained.insert(remark.text).second) continue;
      spdlog::warn("{}", remark.text);
      has_fault = true;
    }
  }
  if (bad == 0 && !(has_fault && raises)) return base::kExitOk;
  std::vector<std::string> keys;
  if (raises) keys.emplace_back("loader.on_error=skip");
  if (budget != 0) {
    keys.push_back(fmt::format("loader.error_budget={}", std::ceil(100 * budget) / 100));
  }
  const std::string without = keys.empty()
                                  ? ", or train without them, as loader.on_error: skip says"
                                  : ", or train without them: " + base::join(keys, " ");
  throw base::UserError(
      fmt::format("check: {} cannot be used; mend or remove the files{}",
                  bad > 0 ? base::counted(bad, "sample") : "data that the warnings name",
                  budget < 1 ? without : ""));  // 1: nothing would be left of a split
}

}  // namespace syncbn::train
