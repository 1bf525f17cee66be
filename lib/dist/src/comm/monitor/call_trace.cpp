#include <spdlog/spdlog.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/flight_record.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "monitor/trace.h"

namespace syncbn::dist {
namespace {

std::atomic<bool> g_traces{false};

/// Never destroyed: threads of a group may end calls during static destruction.
struct Ended {
  std::mutex mutex;
  std::vector<TracedCall> calls;
  bool has_warned = false;

  static Ended& instance() {
    static auto* const ended = new Ended();
    return *ended;
  }
};

}  // namespace

CallTrace::CallTrace() {
  take();
  g_traces = true;
}

CallTrace::~CallTrace() {
  g_traces = false;
  take();
}

std::vector<TracedCall> CallTrace::take() {
  Ended& ended = Ended::instance();
  const std::lock_guard lock(ended.mutex);
  ended.has_warned = false;
  return std::exchange(ended.calls, {});
}

std::optional<std::chrono::nanoseconds> time_between_calls() {
  const auto record = base::FlightRecord::current();
  return record ? std::optional(record->own_time()) : std::nullopt;
}

namespace detail {

int64_t trace_time() {
  return g_traces.load(std::memory_order_relaxed) ? base::unix_ns() : 0;
}

void add_to_trace(TracedCall call) {
  Ended& ended = Ended::instance();
  const std::lock_guard lock(ended.mutex);
  if (ended.calls.size() < CallTrace::kMaxCalls) {
    ended.calls.push_back(std::move(call));
  } else if (!std::exchange(ended.has_warned, true)) {
    spdlog::warn("a CallTrace holds {} calls, and drops later ones until take() is called",
                 CallTrace::kMaxCalls);
  }
}

}  // namespace detail
}  // namespace syncbn::dist
