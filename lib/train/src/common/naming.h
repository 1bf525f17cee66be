#pragma once

#include <syncbn/base/error.h>

#include <cstdint>
#include <string>
#include <vector>

namespace syncbn::train {

/// Calls `work`. Prepends `subject` and a colon to the message of a base::UserError: "cannot load
/// runs/a/best.pt: ...".
template <class Work>
auto naming(const std::string& subject, const Work& work) {
  try {
    return work();
  } catch (const base::UserError& error) {
    throw base::UserError(subject + ": " + error.what());
  }
}

/// The name of a class; its number if it has no name.
inline std::string class_name(const std::vector<std::string>& names, int64_t label) {
  const bool has = label >= 0 && label < std::ssize(names);
  return has ? names[static_cast<size_t>(label)] : std::to_string(label);
}

}  // namespace syncbn::train
