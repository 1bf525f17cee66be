#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "records/gpu_load.h"

namespace syncbn::train {

/// Results by name, in the order in which they are shown: {"loss", 0.1}, {"accuracy", 0.98}.
using Results = std::vector<std::pair<std::string, double>>;

/// The result of this name, if there is one.
std::optional<double> find(const Results& results, const std::string& name);

/// The results of an epoch. Losses are means over samples; shares are in [0, 1].
struct EpochRecord {
  int64_t epoch = 0;  ///< from 1
  int64_t step = 0;
  double lr = 0;
  Results train = {};
  Results eval = {};            ///< empty: not evaluated
  std::string eval_split = {};  ///< "val" or "test"
  double images_per_second = 0;
  // Of the rank that waited for data the longest.
  double data_wait_seconds = 0;  ///< mean per step
  double data_wait_share = 0;    ///< share of the epoch's training time
  /// Peak resident memory of a process, on the rank with the most. 0: unknown.
  double memory_bytes = 0;
  std::optional<GpuLoad> gpu = {};  ///< empty on CPUs
  double seconds = 0;               ///< of the run so far
};

/// The line of log.jsonl about an epoch.
std::string line_of(const EpochRecord& record);
EpochRecord parse_line(const std::string& line);

/// The content of result.json.
struct ResultRecord {
  std::string best_metric;  ///< "accuracy"; empty: no metric says which is the best
  double best_value = 0;
  int64_t best_epoch = 0;
  bool higher_is_better = true;
  EpochRecord last;
  int64_t world_size = 1;
  int64_t seed = 0;
  bool sync_batchnorm = true;
};

/// The text of result.json.
std::string text_of(const ResultRecord& result);

}  // namespace syncbn::train
