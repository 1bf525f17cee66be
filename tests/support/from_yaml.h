#pragma once

#include <syncbn/config/schema.h>
#include <syncbn/config/yaml.h>

#include <string>

namespace syncbn::test {

/// Reads a configuration section that has a `type`.
template <class Kind>
config::Component<Kind> from_yaml(const std::string& yaml, const std::string& section) {
  config::Component<Kind> component;
  config::Faults faults;
  config::Codec<config::Component<Kind>>::read(config::parse_yaml(yaml, "test"), component, section,
                                               faults);
  faults.throw_if_any();
  return component;
}

}  // namespace syncbn::test
