#pragma once

#include <syncbn/base/error.h>

#include <string>

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

}  // namespace syncbn::train
