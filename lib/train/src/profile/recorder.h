#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <syncbn/dist/call_trace.h>
#include <syncbn/models/model.h>

#include "profile/profile_files.h"
#include "profile/rank_profile.h"

namespace torch::autograd::profiler {
struct ProfilerResult;
}

namespace syncbn::train {

/// Records what this process does between start() and stop() with libtorch's profiler (Kineto) and
/// a dist::CallTrace. Start and stop may alternate any number of times. Not thread-safe.
class Recorder {
 public:
  explicit Recorder(const models::Model& model);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool is_running() const { return calls_ != nullptr; }
  /// @param step the first that is recorded
  void start(int64_t step);
  void stop();
  /// Drops everything that was recorded.
  void clear();

  /// Writes a trace for each start() since clear(): one, unless evaluations lay between the steps.
  /// @throws base::UserError or base::UnavailableError naming the file
  void save(const ProfileFiles& files, int64_t rank) const;
  /// Sets the times of layers and exchanges.
  void copy_times_to(RankProfile& profile) const;

 private:
  class Reader;
  struct Trace {
    int64_t first_step;
    std::unique_ptr<torch::autograd::profiler::ProfilerResult> result;
  };

  void start_profiler();

  /// The layer of each parameter and buffer.
  std::unordered_map<const void*, std::string> names_;
  std::unique_ptr<dist::CallTrace> calls_;
  bool has_profiler_ = false;  ///< libtorch's profiler is running
  bool is_refused_ = false;    ///< libtorch's profiler did not start
  int64_t first_step_ = 0;     ///< of the current trace
  std::vector<Trace> traces_;
  RankProfile profile_;
};

}  // namespace syncbn::train
