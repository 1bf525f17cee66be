#pragma once

#include <span>

#include <syncbn/config/component.h>

namespace syncbn::train {

/// A registry from which configurations choose, including plug-ins' entries.
struct Kind {
  const char* name;  ///< for `train --list`: "models"
  config::RegistryBase& (*registry)();
};

std::span<const Kind> all_kinds();

}  // namespace syncbn::train
