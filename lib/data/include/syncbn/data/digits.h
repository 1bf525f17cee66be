#pragma once

#include <memory>
#include <string>

#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>

namespace syncbn::data {

/// Options of `type: digits`.
struct DigitsOptions {
  /// Empty: the digits.csv.gz that ships with this project (find_data_file).
  std::string path;
  /// Share of each class in the test split.
  double test_fraction = 0.2;

  static void describe(config::Schema<DigitsOptions>& schema);
};

/// UCI's handwritten digits: samples [1, 8, 8] in [0, 1], ten classes.
///
/// The split is stratified and depends only on test_fraction, so results of different runs are
/// comparable.
///
/// @throws base::UserError naming the file if it is missing or a damaged gzip stream, and file and
///   line if a line does not have exactly 64 pixels (0 to 16) and a label (0 to 9).
std::shared_ptr<const Dataset> load_digits(const DigitsOptions& options, Split split);

}  // namespace syncbn::data
