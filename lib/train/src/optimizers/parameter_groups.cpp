#include "optimizers/parameter_groups.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/schema.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace syncbn::train {
namespace {

using Matches = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

bool has_last_part(const std::string& name, const std::string& part) {
  return name == part || name.ends_with("." + part);
}

Matches matches(const std::string& pattern) {
  if (pattern == "bias")
    return [](const auto& name, const auto&) { return has_last_part(name, "bias"); };
  if (pattern == "norm") {
    return [](const auto& name, const auto& parameter) {
      return parameter.dim() <= 1 && has_last_part(name, "weight");
    };
  }
  return [pattern](const auto& name, const auto&) {
    return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
}

/// Indices of the parameters that a pattern of the option `key` means.
std::vector<size_t> indices_of(const std::string& key, const std::string& pattern,
                               const NamedTensors& parameters) {
  const Matches match = matches(pattern);
  std::vector<size_t> found;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (match(parameters[i].first, parameters[i].second)) found.push_back(i);
  }
  if (!found.empty()) return found;
  constexpr size_t kShown = 5;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kShown, parameters.size()); ++i) {
    names.push_back(parameters[i].first);
  }
  throw base::UserError(fmt::format("{}: '{}' matches no parameter; there are {}{}", key, pattern,
                                    base::join(names, ", "),
                                    parameters.size() > kShown ? ", …" : ""));
}

void set_rate(const std::string& key, std::string text, ParameterOptions& options) {
  const bool is_factor = text.ends_with('x');
  if (is_factor) text.pop_back();
  const auto number = base::parse_number<double>(text);
  if (!number || !(*number >= 0) || *number > kMaxRate) {
    throw base::UserError(fmt::format(
        "{}: expected a rate such as 0.01, or a factor such as 0.1x, got '{}'", key, text));
  }
  if (is_factor) {
    options.lr_factor = *number;
  } else {
    options.lr = *number;
  }
}

/// The number of each parameter's layer, and their count.
std::pair<std::vector<size_t>, size_t> layers_of(const NamedTensors& parameters) {
  std::vector<std::string> layers;
  std::vector<size_t> numbers;
  for (const auto& [name, parameter] : parameters) {
    const std::string layer = name.substr(0, name.find('.'));
    auto found = std::ranges::find(layers, layer);
    if (found == layers.end()) found = layers.insert(layers.end(), layer);
    numbers.push_back(static_cast<size_t>(found - layers.begin()));
  }
  return {numbers, layers.size()};
}

}  // namespace

void GroupOptions::describe(config::Schema<GroupOptions>& schema) {
  schema
      .field("match", &GroupOptions::match,
             "names of parameters: norm, bias, or a pattern such as backbone.*")
      .required();
  schema.field("lr", &GroupOptions::lr,
               "their rate, such as 0.01, or a factor of lr, such as 0.1x");
  schema.field("weight_decay", &GroupOptions::weight_decay, "null: the optimizer's")
      .between(0, kMaxRate);
}

std::vector<ParameterOptions> parameter_options(const CommonOptions& options,
                                                const NamedTensors& parameters) {
  std::vector<ParameterOptions> all(parameters.size(),
                                    ParameterOptions{.weight_decay = options.weight_decay});
  std::vector<bool> grouped(parameters.size());
  for (size_t i = 0; i < options.groups.size(); ++i) {
    const GroupOptions& group = options.groups[i];
    const std::string key = fmt::format("optimizer.groups[{}]", i);
    for (const size_t index : indices_of(key + ".match", group.match, parameters)) {
      if (grouped[index]) continue;
      grouped[index] = true;
      set_rate(key + ".lr", group.lr, all[index]);
      if (group.weight_decay) all[index].weight_decay = *group.weight_decay;
    }
  }
  for (const std::string& pattern : options.no_decay) {
    for (const size_t index : indices_of("optimizer.no_decay", pattern, parameters)) {
      all[index].weight_decay = 0;
    }
  }
  if (options.layer_decay != 1) {
    const auto [layers, count] = layers_of(parameters);
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].lr_factor *= std::pow(options.layer_decay, static_cast<double>(count - 1 - layers[i]));
    }
  }
  return all;
}

}  // namespace syncbn::train
