#pragma once

#include <syncbn/config/value.h>
#include <syncbn/data/transforms.h>

#include <string>
#include <utility>
#include <vector>

namespace syncbn::test {

using ComponentOptions = std::vector<std::pair<std::string, std::string>>;

/// `{type: <type>, <options>}`, as in a configuration file; a list is "[first,second]".
inline config::Component<data::TransformKind> component(const std::string& type,
                                                        const ComponentOptions& options = {}) {
  config::Value value = config::Value::of_map();
  value.set("type", config::Value::of_scalar(type));
  for (const auto& [key, text] : options) {
    if (!text.starts_with('[')) {
      value.set(key, config::Value::of_scalar(text));
      continue;
    }
    config::Value list;
    list.kind = config::Value::Kind::kList;
    const size_t comma = text.find(',');
    list.list = {config::Value::of_scalar(text.substr(1, comma - 1)),
                 config::Value::of_scalar(text.substr(comma + 1, text.size() - comma - 2))};
    value.set(key, list);
  }
  config::Component<data::TransformKind> made;
  config::Faults faults;
  config::Codec<config::Component<data::TransformKind>>::read(value, made, "step", faults);
  faults.throw_if_any();
  return made;
}

}  // namespace syncbn::test
