#pragma once

#include <string>
#include <vector>

namespace syncbn::train {

/// A configuration as resolved YAML, and what to call it in messages.
struct NamedConfig {
  const std::string& text;
  const std::string& name;
};

/// What of a configuration is not as it was when a checkpoint was made, in words, a setting each.
/// Left out are keys that say where and for how long a run goes on, not what it computes.
/// @throws base::UserError when the checkpoint's state is of no use to this configuration; in the
///   message the checkpoint is "it".
std::vector<std::string> changed_settings(const NamedConfig& checkpoint, const NamedConfig& now);

}  // namespace syncbn::train
