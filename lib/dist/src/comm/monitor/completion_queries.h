#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "monitor/flight_recorder.h"

namespace syncbn::dist::detail {

/// Calls FlightRecorder::update() on a separate thread, because a query of an event does not return
/// while another thread holds the lock of the CUDA context. Thread-safe.
class CompletionQueries {
 public:
  using Logs = std::vector<std::shared_ptr<FlightRecorder>>;

  CompletionQueries() = default;
  ~CompletionQueries();
  CompletionQueries(const CompletionQueries&) = delete;
  CompletionQueries& operator=(const CompletionQueries&) = delete;

  /// Updates the recorders. Returns after `limit` at the latest; the recorders may then be out of
  /// date.
  void update(Logs logs, std::chrono::milliseconds limit);

 private:
  /// Shared with the thread, which may outlive this object.
  struct State {
    std::mutex mutex;  ///< guards the members below; no log is dropped under it
    std::condition_variable changed;
    Logs logs;  ///< to update
    bool is_busy = false;
    bool stop = false;
  };
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  bool has_thread_ = false;
};

}  // namespace syncbn::dist::detail
