#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <syncbn/dist/call_trace.h>
#include <syncbn/models/model.h>

#include "profile/rank_profile.h"

namespace syncbn::train {

/// A row of a trace: the spans of a thread, or others that belong together. Spans may contain each
/// other, but do not overlap otherwise.
struct Track {
  struct Span {
    std::string name;
    Interval time;
  };
  std::string name;
  std::vector<Span> spans = {};
};

/// Records what this process does between start() and stop() with libtorch's profiler (Kineto) and
/// a dist::CallTrace. Start and stop may alternate any number of times. Not thread-safe.
class Recorder {
 public:
  explicit Recorder(const models::Model& model);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool is_running() const { return calls_ != nullptr; }
  void start();
  void stop();
  /// Drops everything that began before this call.
  void begin_anew();

  /// What was recorded since the last call. Sets phases, exchanges and layers of `profile`.
  std::vector<Track> take(RankProfile& profile);

 private:
  class Reader;

  void start_profiler();

  /// The layer of each parameter and buffer.
  std::unordered_map<const void*, std::string> names_;
  std::unique_ptr<dist::CallTrace> calls_;
  bool has_profiler_ = false;                              ///< libtorch's profiler is running
  bool is_refused_ = false;                                ///< libtorch's profiler did not start
  std::map<std::string, std::vector<Track::Span>> spans_;  ///< by track
  RankProfile profile_;
  int64_t first_ = 0;  ///< the earliest time that counts
};

}  // namespace syncbn::train
