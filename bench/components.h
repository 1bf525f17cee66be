#pragma once

#include <string>

#include <syncbn/config/yaml.h>

namespace syncbn::bench {

/// A model, an optimizer or another component from the YAML of a configuration file.
template <class Kind>
config::Component<Kind> component(const std::string& yaml) {
  config::Component<Kind> component;
  config::Faults faults;
  config::Codec<config::Component<Kind>>::read(config::parse_yaml(yaml, "bench"), component, "",
                                               faults);
  faults.throw_if_any();
  return component;
}

}  // namespace syncbn::bench
