#pragma once

#include <span>

#include <syncbn/config/component.h>

namespace syncbn::train {

/// A registry of what configurations choose from, plug-ins' alternatives included.
struct Kind {
  const char* name;  ///< for `train --list`: "models"
  config::RegistryBase& (*registry)();
};

std::span<const Kind> all_kinds();

}  // namespace syncbn::train
