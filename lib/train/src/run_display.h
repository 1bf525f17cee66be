#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <fmt/format.h>

#include <syncbn/base/log.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>

#include "measures.h"
#include "records/epoch_record.h"
#include "records/memory_gauge.h"
#include "records/progress.h"

namespace syncbn::train {

/// Rank 0's display of a run: a bar, and lines above it. Does nothing on the other ranks. Not
/// thread-safe.
class RunDisplay {
 public:
  RunDisplay(const Config& config, const Measures& measures, AgentChannel& channel,
             at::Device device);

  /// Removes the bar. Returns whether this is rank 0.
  bool clear();

  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) {
    if (clear()) spdlog::info(text, std::forward<Args>(args)...);
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) {
    if (clear()) spdlog::warn(text, std::forward<Args>(args)...);
  }

  /// A value of a step, and its mean over the epoch so far.
  struct Averaged {
    double last = 0;
    double mean = 0;
  };

  /// A step that has been taken.
  struct Step {
    int64_t step = 0;
    int64_t total = 0;  ///< steps of the run
    int64_t epoch = 0;
    Averaged loss;
    double lr = 0;
    double images_per_second = 0;
    double data_wait_share = 0;
    Averaged batch_seconds;                  ///< from one step to the next
    Averaged data_seconds;                   ///< of batch_seconds, the wait for the batch
    std::vector<Metric> metrics = {};        ///< since the last logged step
    std::vector<Metric> epoch_metrics = {};  ///< the same metrics of the epoch so far
  };
  /// @param is_logged whether to log it as a line as well, with all averages
  void step(const Step& step, bool is_logged);

  /// Shows the batches of an evaluation after `record`'s training.
  void evaluation(const EpochRecord& record, int64_t total_steps, int64_t batch, int64_t batches);

  /// Logs a line about an epoch; the following steps show its results as well.
  void epoch(const EpochRecord& record);

  /// Logs the lines at the end of a run.
  /// @param best empty: no evaluation gave a number
  void result(const EpochRecord& last, const std::optional<Checkpoint::Best>& best,
              const std::filesystem::path& folder);

 private:
  const Config& config_;
  const Measures& measures_;
  Progress progress_;
  MemoryGauge memory_;
  std::string headline_;  ///< of the last evaluation
};

/// "2931 images/s", or "0.42 images/s"
std::string rate(double images_per_second);

/// "build/bin/train eval runs/mine"
std::string command_line(const std::string& command, const std::filesystem::path& run);

/// "build/bin/train runs/mine --nproc_per_node=2"
std::string resume_command(const std::filesystem::path& run);

}  // namespace syncbn::train
