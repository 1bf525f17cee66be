#include "checkpoints/python_run.h"

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/models/torch_archive.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/schedule.h>

#include <algorithm>
#include <set>
#include <utility>

#include "step/model.h"

namespace syncbn::train {
namespace {

using Groups = std::vector<Optimizer::Group>;
using models::Dict;

constexpr const char* kUnknown = "unknown";

double number_in(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
}

config::Value setting_of(double number) {
  return config::Codec<double>::write(number);
}

config::Value setting_of(const c10::IValue& value) {
  if (value.isBool()) return config::Codec<bool>::write(value.toBool());
  if (!value.isList()) return setting_of(number_in(value));
  std::vector<config::Value> items;
  for (const c10::IValue& item : value.toListRef()) items.push_back(setting_of(item));
  return config::detail::list_of(std::move(items));
}

std::vector<Dict> dicts(const c10::IValue& list) {
  std::vector<Dict> all;
  for (const c10::IValue& item : list.toListRef()) all.push_back(item.toGenericDict());
  return all;
}

/// @throws base::UserError if there is no such key, or an object at it, such as NumPy's number
c10::IValue need(const Dict& dict, const std::string& key) {
  if (!dict.contains(key)) throw base::UserError(fmt::format("it has no '{}'", key));
  c10::IValue value = dict.at(key);
  if (!value.isTuple()) return value;
  throw base::UserError(fmt::format(
      "its '{}' is the Python object {}, which is not read; a number is saved with float(…)", key,
      base::printable(value.toTupleRef().elements()[0].toStringRef())));
}

/// The number of epochs that the run has completed.
int64_t ended_epochs(const Dict& run, bool is_imagenet) {
  const c10::IValue epoch = need(run, "epoch");
  // torchvision saves the number of the completed epoch, from 0; the example that of the next one.
  const int64_t first = is_imagenet ? 1 : 0;
  constexpr auto kLast = static_cast<int64_t>(kMaxEpochs);
  if (epoch.isInt() && epoch.toInt() >= first && epoch.toInt() <= kLast) {
    return epoch.toInt() + 1 - first;
  }
  throw base::UserError(fmt::format("its epoch is {}; expected a whole number from {} to {}",
                                    epoch.isInt() ? std::to_string(epoch.toInt()) : "no number",
                                    first, kLast));
}

/// @throws base::UserError for a value that is infinite or not a number
void check_finite(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.is_floating_point() || tensor.isfinite().all().item<bool>()) return;
  throw base::UserError(fmt::format(
      "its '{}' has values that are infinite or NaN, with which no run can continue; take an older "
      "checkpoint",
      name));
}

/// The tensors of the dictionary `key` of a file, under the model's names.
Checkpoint::Tensors weights_of(const std::filesystem::path& path, const std::string& key,
                               models::Model& model) {
  models::load_state_dict(model, models::read_state_dict(path, key));
  Checkpoint::Tensors all = state_of(model);
  for (auto& [name, tensor] : all) {
    check_finite(name, tensor);
    tensor = tensor.detach().clone();
  }
  return all;
}

// ---- the optimizer's state ---------------------------------------------------------------------

/// Why parameters do not match a group of Python's, by their number and their states' shapes; empty
/// if they do.
std::string misfit(const NamedTensors& parameters, const Dict& group, const Dict& states) {
  const auto numbers = group.at("params").toListRef();
  if (numbers.size() != parameters.size()) {
    return fmt::format("it has {}, the configuration {}",
                       base::counted(std::ssize(numbers), "parameter"), parameters.size());
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto state = states.find(numbers[i]);
    if (state == states.end()) continue;
    const auto& [name, parameter] = parameters[i];
    for (const auto& entry : state->value().toGenericDict()) {
      if (!entry.value().isTensor() || entry.key().toStringRef() == "step") continue;
      const at::Tensor tensor = entry.value().toTensor();
      if (tensor.sizes() == parameter.sizes()) continue;
      return fmt::format("{} of parameter {} is [{}], {} is [{}]", entry.key().toStringRef(), i,
                         fmt::join(tensor.sizes(), ", "), name, fmt::join(parameter.sizes(), ", "));
    }
  }
  return {};
}

/// The parameters of each of Python's groups. Python numbers parameters by group.
Groups groups_of(const std::vector<Dict>& python, const Dict& states,
                 const PythonRunTarget& target) {
  Groups own = target.optimizer.groups();
  // With one group, the order is that of model.parameters().
  if (python.size() == 1) {
    own.front().parameters = trainable_parameters(target.model);
    own.resize(1);
  }
  Groups matched;
  for (const Dict& group : python) {
    const size_t size = group.at("params").toListRef().size();
    std::string why = "the configuration has fewer groups";
    const auto found = std::ranges::find_if(own, [&](const auto& candidate) {
      const std::string reason = misfit(candidate.parameters, group, states);
      const bool is_nearest = candidate.parameters.size() == size || &candidate == &own.front();
      if (is_nearest) why = reason;
      return reason.empty();
    });
    if (found == own.end()) {
      throw base::UserError(fmt::format(
          "group {} of its optimizer does not fit: {}; set model, optimizer.no_decay and "
          "optimizer.groups as in Python",
          matched.size() + 1, why));
    }
    matched.push_back(std::move(*found));
    own.erase(found);
  }
  return matched;
}

/// Each parameter must have no state, or the same keys as the others.
void check_complete(const OptimizerState& state) {
  std::set<std::string> keys;
  for (const auto& [name, tensors] : state) {
    for (const auto& [key, tensor] : tensors) keys.insert(key);
  }
  for (const auto& [name, tensors] : state) {
    for (const std::string& key : keys) {
      if (tensors.empty() || tensors.contains(key)) continue;
      throw base::UserError(fmt::format("its optimizer has no {} of {}", key, name));
    }
  }
}

OptimizerState named_state(const std::vector<Dict>& python, const Dict& states,
                           const Groups& groups) {
  OptimizerState named;
  for (size_t k = 0; k < groups.size(); ++k) {
    const auto numbers = python[k].at("params").toListRef();
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto state = states.find(numbers[i]);
      if (state == states.end()) continue;
      auto& tensors = named[groups[k].parameters[i].first];
      for (const auto& entry : state->value().toGenericDict()) {
        const c10::IValue& value = entry.value();
        if (value.isNone()) continue;  // momentum before the first step
        tensors[entry.key().toStringRef()] =
            value.isTensor() ? value.toTensor() : at::scalar_tensor(value.toScalar());
        check_finite(entry.key().toStringRef(), tensors[entry.key().toStringRef()]);
      }
    }
  }
  check_complete(named);
  return named;
}

// ---- hyperparameters ---------------------------------------------------------------------------

/// The type of optimizer, which a group does not name, by its options.
/// @param chosen the configuration's
std::string optimizer_type(const Dict& group, const Dict& run, const std::string& chosen) {
  if (group.contains("alpha")) return "rmsprop";
  if (!group.contains("betas")) return group.contains("momentum") ? "sgd" : kUnknown;
  if (group.contains("decoupled_weight_decay")) {
    return group.at("decoupled_weight_decay").toBool() ? "adamw" : "adam";
  }
  // Older torch has the same keys for both. torchvision's script, which saves its arguments,
  // supports only AdamW.
  return run.contains("args") || chosen == "adamw" ? "adamw" : "adam";
}

/// Options of torch.optim's optimizers that have the same names and meanings here, besides lr and
/// weight_decay; empty for an optimizer that torch.optim lacks.
std::vector<std::string> python_options(const std::string& optimizer_type) {
  if (optimizer_type == "sgd") return {"momentum", "dampening", "nesterov"};
  if (optimizer_type == "rmsprop") return {"alpha", "eps", "momentum", "centered"};
  if (optimizer_type == "adam" || optimizer_type == "adamw") return {"betas", "eps", "amsgrad"};
  return {};
}

/// One number for all groups, or a list.
config::Value of_groups(const std::vector<double>& numbers) {
  if (std::ranges::count(numbers, numbers.front()) == std::ssize(numbers)) {
    return setting_of(numbers.front());
  }
  return config::Codec<std::vector<double>>::write(numbers);
}

void set_optimizer(config::Value& section, const std::vector<Dict>& python, const Dict& run,
                   const Groups& groups, const PythonRunTarget& target) {
  const Dict& first = python.front();
  const std::string type = optimizer_type(first, run, section.find("type")->scalar);
  section.set("type", config::Value::of_scalar(type));
  for (const std::string& key : python_options(type)) {
    if (section.find(key) != nullptr) section.set(key, setting_of(need(first, key)));
  }
  // Python's single group has the same rates for all parameters.
  if (python.size() == 1 && target.optimizer.groups().size() > 1) {
    for (const char* key : {"no_decay", "groups"}) section.set(key, config::detail::list_of({}));
    section.set("layer_decay", setting_of(1));
  }
  const double base_lr = target.optimizer.base_lr();
  std::vector<double> rates;
  std::vector<double> decays;
  bool has_other_decay = false;
  for (size_t k = 0; k < groups.size(); ++k) {
    const double rate =
        number_in(need(python[k], python[k].contains("initial_lr") ? "initial_lr" : "lr"));
    rates.push_back(rate / (groups[k].lr / base_lr));
    decays.push_back(number_in(need(python[k], "weight_decay")));
    has_other_decay = has_other_decay || decays.back() != groups[k].weight_decay;
  }
  section.set("lr", of_groups(rates));
  if (has_other_decay) section.set("weight_decay", of_groups(decays));
}

/// Recognises a scheduler's class by its options.
void set_scheduler(config::Value& section, const Dict& state) {
  const auto set = [&](const char* type, std::vector<std::pair<const char*, const char*>> keys) {
    if (section.find("type")->scalar != type) section = config::Value::of_map();
    section.set("type", config::Value::of_scalar(type));
    for (const auto& [key, python] : keys) section.set(key, setting_of(need(state, python)));
  };
  if (state.contains("step_size")) {
    set("step", {{"step_size", "step_size"}, {"gamma", "gamma"}});
  } else if (state.contains("milestones")) {
    set("multistep", {{"gamma", "gamma"}});
    constexpr int64_t kMaxRepeats = 100;    // of a milestone: a damaged file may say more
    std::vector<config::Value> milestones;  // Python counts how often each occurs
    for (const auto& entry : state.at("milestones").toGenericDict()) {
      for (int64_t i = 0; i < std::min(entry.value().toInt(), kMaxRepeats); ++i) {
        milestones.push_back(setting_of(entry.key()));
      }
    }
    section.set("milestones", config::detail::list_of(std::move(milestones)));
  } else if (state.contains("T_max")) {
    set("cosine", {{"min_lr", "eta_min"}});
  } else if (state.contains("gamma")) {
    set("exponential", {{"gamma", "gamma"}});
  } else {
    section.set("type", config::Value::of_scalar(kUnknown));
  }
}

void set_schedule(config::Value& config, const Dict& state) {
  config::Value& section = *config.find("schedule");
  const bool has_warmup = state.contains("_schedulers");
  const std::vector<Dict> parts = has_warmup ? dicts(state.at("_schedulers")) : std::vector{state};
  const Dict& main = parts.back();
  set_scheduler(section, main);
  // The other schedulers' rates are the same step by step.
  if (has_warmup || main.contains("T_max") || section.find("type")->scalar == "exponential") {
    section.set("by_epoch", config::Codec<bool>::write(true));
  }
  double warmup = 0;
  if (has_warmup && parts.size() == 2 && parts.front().contains("start_factor")) {
    warmup = number_in(need(parts.front(), "total_iters"));
    section.set("warmup_start", setting_of(need(parts.front(), "start_factor")));
  } else if (has_warmup) {
    section.set("type", config::Value::of_scalar(kUnknown));
  }
  section.set("warmup", setting_of(warmup));
  if (main.contains("T_max")) {
    config.set("epochs", setting_of(number_in(need(main, "T_max")) + warmup));
  }
}

Checkpoint convert(const std::filesystem::path& path, const PythonRunTarget& target) {
  const Dict run = models::read_torch_values(path).toGenericDict();
  const bool is_imagenet = run.contains("state_dict");
  const int64_t epochs = ended_epochs(run, is_imagenet);
  Checkpoint checkpoint;
  if (run.contains("model_ema")) {
    checkpoint.ema = weights_of(path, "model_ema", target.model);
  }
  checkpoint.model = weights_of(path, is_imagenet ? "state_dict" : "model", target.model);
  const Dict optimizer = need(run, "optimizer").toGenericDict();
  const Dict states = need(optimizer, "state").toGenericDict();
  const std::vector<Dict> python = dicts(need(optimizer, "param_groups"));
  if (python.empty()) throw base::UserError("its optimizer has no param_groups");
  for (const Dict& group : python) {
    if (!group.contains("maximize") || !group.at("maximize").toBool()) continue;
    throw base::UserError("its optimizer maximizes the loss, which train does not");
  }
  const Groups groups = groups_of(python, states, target);
  checkpoint.optimizer = named_state(python, states, groups);
  if (run.contains("scaler") && !run.at("scaler").toGenericDict().empty()) {
    const Dict scaler = run.at("scaler").toGenericDict();
    checkpoint.scaler = {
        {"scale", at::scalar_tensor(number_in(need(scaler, "scale")))},
        {"growth_tracker", at::scalar_tensor(scaler.at("_growth_tracker").toInt(), at::kInt)}};
  }
  config::Value config = config::parse_yaml(target.config, "config");
  set_optimizer(*config.find("optimizer"), python, run, groups, target);
  const char* const scheduler = is_imagenet ? "scheduler" : "lr_scheduler";
  if (run.contains(scheduler)) set_schedule(config, run.at(scheduler).toGenericDict());
  checkpoint.config = config::to_yaml(config);
  checkpoint.sampler = target.start;
  checkpoint.sampler.epoch = epochs;
  checkpoint.sampler.consumed = 0;
  checkpoint.step = checkpoint.sampler.epoch * target.steps_per_epoch;
  checkpoint.world_size = target.world_size;
  return checkpoint;
}

}  // namespace

bool is_python_run(const std::filesystem::path& path) {
  const c10::IValue values = models::read_torch_values(path);
  if (!values.isGenericDict()) return false;
  const Dict run = values.toGenericDict();
  const auto has = [&](const char* key) { return run.contains(key); };
  return has("optimizer") && has("epoch") && (has("state_dict") || has("model"));
}

Checkpoint read_python_run(const std::filesystem::path& path, const PythonRunTarget& target) {
  try {
    return convert(path, target);
  } catch (const base::UserError&) {
    throw;
  } catch (const base::UnavailableError&) {
    throw;
  } catch (const std::exception&) {
    // A key that is missing or of another type: libtorch's message names its own source lines.
    throw base::UserError(
        "it is not laid out as a checkpoint of torchvision's references/classification/train.py "
        "or of imagenet/main.py; to begin with its weights, set init");
  }
}

}  // namespace syncbn::train
