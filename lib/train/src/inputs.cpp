#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/dataset.h>
#include <syncbn/data/subset.h>
#include <syncbn/train/inputs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "common/component_error.h"
#include "common/config_keys.h"
#include "common/naming.h"

namespace syncbn::train {
namespace {

/// Checks that a sample of a plug-in's data set is as the set describes it.
void check_sample(const Config& config, const data::Dataset& set) {
  if (plugin_of(config.data).empty() || set.size() < 1 || set.sizes_vary()) return;
  naming(component_name("data", config.data), [&] {
    std::vector<int64_t> expected = set.sample_shape();
    expected.insert(expected.begin(), 1);
    const int64_t first = 0;
    const auto get = [&] { return set.get_batch({&first, 1}); };
    const data::Batch batch = refusing([] { return std::string("get_batch()"); }, get);
    const std::vector<int64_t> found = batch.data.sizes().vec();
    if (found == expected) return;
    throw base::UserError(fmt::format(
        "get_batch() makes [{}] of one sample, and with its sample_shape() it has to make [{}]",
        fmt::join(found, ", "), fmt::join(expected, ", ")));
  });
}

/// A split of the data, or null. If a file is missing, the message begins with the key that names
/// it, and says where a relative path starts: the configuration may have been written for another
/// working directory.
std::shared_ptr<const data::Dataset> make_data(const Config& config, data::Split split) {
  const auto name = [&] { return component_name("data", config.data); };
  try {
    auto set = refusing(name, [&] { return config.data.make(split); });
    if (set && set->size() < 0) {
      throw base::UserError(fmt::format("{}: size() of the {} split is {}; it has to be 0 or more",
                                        name(), to_string(split), set->size()));
    }
    return set;
  } catch (const base::UserError& error) {
    const std::string what = error.what();
    if (what.find(std::strerror(ENOENT)) == what.npos) throw;
    const config::Value all = config::Schema<Config>::get().write(config);
    for (const config::Value::Member& member : all.find("data")->members) {
      const std::filesystem::path path = member.value.scalar;
      // For shards, the part before their numbers: train-{00..99}.tar
      const std::string named = path.string().substr(0, path.string().find('{'));
      if (!is_path_of_data("data." + member.key) || path.empty() || base::exists(path) ||
          what.find(named) == what.npos) {
        continue;
      }
      std::error_code ignored;
      std::string advice;
      if (!path.is_absolute()) {
        advice = fmt::format(
            " (it is relative to the working folder, {}; start where it leads to the data, set "
            "data.{}=/ABSOLUTE/PATH, or write ${{here}}/{} for a path relative to the "
            "configuration)",
            std::filesystem::current_path(ignored).string(), member.key, path.string());
      }
      const bool may_lack = member.key == "test" && plugin_of(config.data).empty();
      if (may_lack && config.val_fraction > 0) advice += "; data.test= trains without test data";
      throw base::UserError(fmt::format("data.{}: {}{}", member.key, what, advice));
    }
    throw;
  }
}

/// The validation split, or null. Takes its samples out of `train_set` if val_fraction is set.
std::shared_ptr<const data::Dataset> make_val_set(const Config& config,
                                                  std::shared_ptr<const data::Dataset>& train_set) {
  auto val_set = make_data(config, data::Split::kVal);
  if (config.val_fraction == 0) return val_set;
  if (val_set) {
    throw base::UserError("val_fraction: the data has a validation split already; set only one");
  }
  const auto parts = data::hold_out(train_set->size(), train_set->labels(), config.val_fraction);
  if (parts.held_out.empty() || parts.train.empty()) {
    throw base::UserError(
        fmt::format("val_fraction: {} of {} leaves no sample to {}; choose another share, or 0",
                    config.val_fraction, base::counted(train_set->size(), "training sample"),
                    parts.train.empty() ? "train on" : "evaluate on"));
  }
  auto plain = make_data(config, data::Split::kHeldOut);
  if (!plain || plain->size() != train_set->size()) {
    throw base::UserError(
        "val_fraction: this data set has no Split::kHeldOut, the training samples with the "
        "transforms for evaluation");
  }
  train_set = data::subset(train_set, parts.train);
  return data::subset(std::move(plain), parts.held_out);
}

/// A label means the same in both splits only if the lists of classes are the same.
void check_same_classes(const Inputs& inputs) {
  const std::vector<std::string> trained = inputs.train_set->class_names();
  const std::vector<std::string> evaluated = inputs.eval_set->class_names();
  const auto name = [](const std::vector<std::string>& names, size_t label) {
    return label < names.size() ? fmt::format("'{}'", names[label]) : "missing";
  };
  for (size_t label = 0; label < std::max(trained.size(), evaluated.size()); ++label) {
    if (name(trained, label) == name(evaluated, label)) continue;
    throw base::UserError(fmt::format(
        "data: class {} is {} in the training split and {} in the {} split; give both the same "
        "classes",
        label, name(trained, label), name(evaluated, label), to_string(inputs.eval_split)));
  }
}

/// Chooses the data to evaluate on.
void choose_eval_set(const Config& config, Inputs& inputs) {
  auto val_set = make_val_set(config, inputs.train_set);
  if (val_set && val_set->fingerprint() == inputs.train_set->fingerprint()) {
    throw base::UserError(
        "data: the validation split is the training split; choose another folder; a "
        "custom data set returns null for Split::kVal");
  }
  inputs.eval_split = val_set ? data::Split::kVal : data::Split::kTest;
  inputs.eval_set = val_set ? std::move(val_set) : make_data(config, data::Split::kTest);
  if (!inputs.eval_set) {
    throw base::UserError(
        "data: there is no split to evaluate on; set data.val, data.test or val_fraction");
  }
  if (inputs.eval_set->size() == 0) {
    throw base::UserError(
        fmt::format("data: the {} split is empty; there is nothing to evaluate on",
                    to_string(inputs.eval_split)));
  }
  check_same_classes(inputs);
}

void check_classes(const data::Dataset& set) {
  const std::vector<std::string> names = set.class_names();
  const auto is_split = [](const std::string& name) {
    return name == "train" || name == "val" || name == "valid" || name == "test";
  };
  if (names.empty() || !std::ranges::all_of(names, is_split)) return;
  throw base::UserError(fmt::format(
      "data: the folders of the classes are called {}; name the folder of training samples, which "
      "is one of them",
      base::join(names, " and ")));
}

void check_readable(const Config& config, const Inputs& inputs) {
  if (config.loader.on_error == "skip") return;
  for (const auto& set : {inputs.train_set, inputs.eval_set}) {
    for (const auto& [text, is_fault, unreadable] : set->remarks()) {
      if (is_fault) {
        throw base::UserError(fmt::format("data: {}; loader.on_error=skip leaves them out", text));
      }
    }
  }
}

/// A split's samples as `train eval` uses them: without augmentation. Null if there are none.
std::shared_ptr<const data::Dataset> make_split(const Config& config, data::Split split) {
  std::shared_ptr<const data::Dataset> set;
  if (split == data::Split::kVal && config.val_fraction > 0) {
    auto train_set = make_data(config, data::Split::kTrain);
    set = make_val_set(config, train_set);
  } else {
    const bool is_train = split == data::Split::kTrain;
    set = make_data(config, is_train ? data::Split::kHeldOut : split);
    if (is_train && set && config.val_fraction > 0) {
      set =
          data::subset(set, data::hold_out(set->size(), set->labels(), config.val_fraction).train);
    }
  }
  return set && set->size() > 0 ? set : nullptr;
}

[[noreturn]] void throw_no_split(const Config& config, data::Split split) {
  std::vector<std::string> present;
  for (const auto other : {data::Split::kTrain, data::Split::kVal, data::Split::kTest}) {
    if (make_split(config, other)) present.push_back(to_string(other));
  }
  throw base::UserError(fmt::format("eval: the data has no {} split; choose --split {}",
                                    to_string(split), base::join(present, " or ")));
}

}  // namespace

int64_t divided_batch(const Config& config, int world_size) {
  const int64_t batch_size = config.local_batch_size(world_size);
  if (batch_size % config.accumulate != 0) {
    throw base::UserError(
        fmt::format("accumulate: a rank's batch of {} cannot be divided into {} equal parts",
                    base::counted(batch_size, "sample"), config.accumulate));
  }
  const int64_t group = config.sync_batchnorm_group.value_or(1);
  if (world_size % group != 0) {
    throw base::UserError(
        fmt::format("sync_batchnorm_group: {} cannot be divided into groups of {}",
                    base::counted(world_size, "rank"), group));
  }
  return batch_size;
}

Inputs load_split(const Config& config, data::Split split, int world_size) {
  Inputs inputs;
  inputs.batch_size = config.local_batch_size(world_size);
  inputs.eval_split = split;
  inputs.eval_set = make_split(config, split);
  if (!inputs.eval_set) throw_no_split(config, split);
  inputs.train_set = inputs.eval_set;
  config.task.make(*inputs.eval_set);
  check_readable(config, inputs);
  check_sample(config, *inputs.eval_set);
  return inputs;
}

Inputs load_inputs(const Config& config, int rank, int world_size) {
  Inputs inputs;
  inputs.batch_size = divided_batch(config, world_size);
  inputs.train_set = make_data(config, data::Split::kTrain);
  check_classes(*inputs.train_set);
  config.task.make(*inputs.train_set);  // reports what does not suit the task
  choose_eval_set(config, inputs);
  // Finds before training what `train eval` would find after it.
  inputs.has_test_set =
      inputs.eval_split == data::Split::kTest || make_data(config, data::Split::kTest) != nullptr;
  check_readable(config, inputs);
  check_sample(config, *inputs.train_set);
  inputs.make_sampler = [sampler = config.sampler, train_set = inputs.train_set, rank,
                         world_size](int64_t seed) {
    return sampler.make(data::SamplerArgs{.size = train_set->size(),
                                          .labels = train_set->labels(),
                                          .num_replicas = world_size,
                                          .rank = rank,
                                          .seed = seed,
                                          .shard_ends = train_set->shard_ends()});
  };
  const int64_t samples = inputs.make_sampler(0)->size();
  if (config.loader.drop_last && samples < inputs.batch_size) {
    throw base::UserError(fmt::format(
        "loader.drop_last: a rank has {} per epoch, less than one batch of {}, so there "
        "would be nothing to train on; take a smaller batch or drop_last: false",
        base::counted(samples, "sample"), inputs.batch_size));
  }
  return inputs;
}

}  // namespace syncbn::train
