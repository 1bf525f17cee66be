#pragma once

#include <cstdint>

#include <syncbn/dist/call_trace.h>

namespace syncbn::dist::detail {

/// The Unix time in ns; 0 while there is no CallTrace. Thread-safe.
int64_t trace_time();
/// Adds a call that has ended to the CallTrace. Thread-safe.
void add_to_trace(TracedCall call);

}  // namespace syncbn::dist::detail
