#include "optimizers/parameter_groups.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace syncbn::train {
namespace {

constexpr size_t kMaxNamesShown = 5;

/// Some of the names, evenly spread.
std::string examples(const NamedTensors& parameters) {
  if (parameters.empty()) return "the model has no parameters to train";
  const size_t shown = std::min(parameters.size(), kMaxNamesShown);
  std::vector<std::string> names;
  for (size_t i = 0; i < shown; ++i) {
    names.push_back(parameters[i * (parameters.size() - 1) / std::max<size_t>(shown - 1, 1)].first);
  }
  return fmt::format(
      "the model has {}{}", base::join(names, ", "),
      shown < parameters.size() ? fmt::format(" and {} more", parameters.size() - shown) : "");
}

bool ends_with_component(const std::string& name, const std::string& component) {
  return name == component || name.ends_with("." + component);
}

/// Parameters of normalisation layers: weights with at most one dimension, and the biases beside
/// them.
std::set<std::string> norm_parameters(const NamedTensors& parameters) {
  constexpr std::string_view kWeight = "weight";
  std::set<std::string> norms;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.dim() > 1 || !ends_with_component(name, "weight")) continue;
    norms.insert(name);
    norms.insert(name.substr(0, name.size() - kWeight.size()) + "bias");
  }
  return norms;
}

/// Indices of the parameters that a pattern of the option `key` matches.
/// @throws base::UserError if there are none
std::vector<size_t> matching(const std::string& key, const std::string& pattern,
                             const NamedTensors& parameters) {
  const std::set<std::string> norms = norm_parameters(parameters);
  std::vector<size_t> indices;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].first;
    const bool matches = pattern == "norm"   ? norms.contains(name)
                         : pattern == "bias" ? name.ends_with("bias")
                                             : ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    if (matches) indices.push_back(i);
  }
  if (!indices.empty()) return indices;
  throw base::UserError(fmt::format("optimizer.{}: '{}' matches no parameter; {}", key, pattern,
                                    examples(parameters)));
}

void leave_out_decay(const std::vector<std::string>& no_decay, const NamedTensors& parameters,
                     std::vector<ParameterRates>& rates) {
  for (size_t k = 0; k < no_decay.size(); ++k) {
    for (const size_t i : matching(fmt::format("no_decay.{}", k), no_decay[k], parameters)) {
      rates[i].weight_decay = 0;
    }
  }
}

void decay_layers(double factor, const NamedTensors& parameters,
                  std::vector<ParameterRates>& rates) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : parameters) names.push_back(name);
  const std::vector<size_t> layers = layers_of(names);
  for (size_t i = 0; i < rates.size(); ++i) {
    rates[i].lr *= std::pow(factor, static_cast<double>(layers.back() - layers[i]));
  }
}

void apply_groups(const CommonOptions& options, const NamedTensors& parameters,
                  std::vector<ParameterRates>& rates) {
  std::vector<bool> is_taken(parameters.size());
  for (size_t k = 0; k < options.groups.size(); ++k) {
    const ParameterGroup& group = options.groups[k];
    const std::string key = fmt::format("groups.{}.match", k);
    bool has_any = false;
    for (const size_t i : matching(key, group.match, parameters)) {
      if (is_taken[i]) continue;
      has_any = is_taken[i] = true;
      if (group.lr) rates[i].lr = group.lr->rate(options.lr);
      if (group.weight_decay) rates[i].weight_decay = *group.weight_decay;
    }
    if (has_any) continue;
    throw base::UserError(
        fmt::format("optimizer.{}: groups before it have all the parameters that '{}' matches; "
                    "put it before them",
                    key, group.match));
  }
}

}  // namespace

std::vector<ParameterRates> parameter_rates(const CommonOptions& options,
                                            const NamedTensors& parameters) {
  std::vector<ParameterRates> rates(parameters.size(),
                                    {.lr = options.lr, .weight_decay = options.weight_decay});
  leave_out_decay(options.no_decay, parameters, rates);
  if (options.layer_decay != 1) decay_layers(options.layer_decay, parameters, rates);
  apply_groups(options, parameters, rates);
  return rates;
}

std::vector<size_t> layers_of(const std::vector<std::string>& names) {
  const auto layer_of = [](const std::string& name) {
    const std::string module = name.substr(0, name.rfind('.'));  // the whole name if it has no dot
    for (size_t begin = 0; begin < module.size();) {
      const size_t end = std::min(module.find('.', begin), module.size());
      const char last = end > begin ? module[end - 1] : '.';
      if (last >= '0' && last <= '9') return module.substr(0, end);
      begin = end + 1;
    }
    return module.substr(0, module.find('.'));
  };
  std::vector<size_t> layers;
  size_t layer = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0 && layer_of(names[i]) != layer_of(names[i - 1])) ++layer;
    layers.push_back(layer);
  }
  return layers;
}

}  // namespace syncbn::train
