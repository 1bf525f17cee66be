#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <syncbn/config/value.h>
#include <syncbn/data/image.h>

#include "records/log_record.h"

namespace syncbn::train {

/// A histogram of a tensor's values.
struct Histogram {
  double min = 0;
  double max = 0;
  double count = 0;
  double sum = 0;
  double sum_of_squares = 0;
  std::vector<double> limits = {};  ///< upper ends of the ranges
  std::vector<double> counts = {};  ///< number of values in each range
};

/// The data of a run for TensorBoard: a file of TFRecords, each an Event of
/// tensorflow/core/util/event.proto. Not thread-safe.
class EventFile {
 public:
  /// Names a new file in the folder. The first write() creates it.
  explicit EventFile(const std::filesystem::path& folder);

  /// The event files of a folder, including those of earlier runs.
  static std::vector<std::filesystem::path> all_in(const std::filesystem::path& folder);

  /// Makes TensorBoard drop what the files so far say about `step` and later ones.
  void restart_at(int64_t step);

  /// Adds a curve for each value: "train/loss" for "train_loss", likewise for "val" and "test", and
  /// "EVENT/NAME" for other names.
  void add(const LogRecord& record);

  /// @param png the image as a PNG file
  void add_image(const std::string& tag, int64_t step, const data::Image& image,
                 std::string_view png);

  void add_histogram(const std::string& tag, int64_t step, const Histogram& histogram);

  /// Adds the configuration to TensorBoard's table of hyperparameters.
  void begin_session(const config::Value& config);
  /// Marks the run as finished in that table.
  void end_session();

  /// Writes what was added since the last call. @throws as base::throw_file_error()
  void write();

 private:
  void add_event(double time, int64_t step, uint32_t kind, std::string_view payload);
  void add_hyperparameters(std::string_view tag, uint32_t kind, std::string_view payload);

  std::filesystem::path file_;
  std::string records_;  ///< not written yet
};

}  // namespace syncbn::train
