#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/value.h>

#include "records/run_log.h"
#include "report/number_table.h"

namespace syncbn::train {

/// What a run's folder says about the run, which may still be training.
struct RunRecords {
  std::filesystem::path folder;
  std::string name;                  ///< of the folder
  config::Value config;              ///< of config.yaml; null without it
  std::string config_text;           ///< the same, as it was written
  NumberTable epochs;                ///< the log's lines about epochs
  NumberTable steps;                 ///< the same about steps; empty if they were not asked for
  nlohmann::ordered_json step_time;  ///< the log's last line of this event, or null
  /// For each rank, the number of last epochs in a row in which it held up the others.
  std::vector<int> slow_epochs;
  nlohmann::ordered_json start;   ///< the log's last line of this event, or null
  nlohmann::ordered_json end;     ///< the same, if no start follows it
  nlohmann::ordered_json result;  ///< result.json, or null

  /// "finished", "stopped by SIGTERM", "running", or "no end" if no process writes to the folder.
  std::string state() const;

  /// The value of a key, "task.type"; empty without it.
  std::string setting(const std::string& path) const;

  /// The metric that chooses the best network, and its best value.
  struct Best {
    std::string name;  ///< "test_accuracy"
    double value = 0;
    double last = 0;  ///< at the end, or so far; NaN without it
    int64_t epoch = 0;
    bool higher_is_better = true;
  };
  /// Nothing before the first evaluation, and for a task without such a metric.
  std::optional<Best> best() const;
};

/// @throws base::UserError for a folder that holds no run, or the run of a newer version of `train`
RunRecords read_run(const std::filesystem::path& folder, ReadSteps steps);

}  // namespace syncbn::train
