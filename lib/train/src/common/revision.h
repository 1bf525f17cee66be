#pragma once

namespace syncbn::train {

/// The commit that this library was built from, with a hash of uncommitted changes; empty outside
/// of a git checkout. The build writes it.
extern const char* const kRevision;

}  // namespace syncbn::train
