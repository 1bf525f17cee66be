#pragma once

#include <memory>
#include <string>

#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>

namespace syncbn::data {

/// Options of `type: digits`.
struct DigitsOptions {
  /// The file; empty: the digits.csv.gz that ships with this project (find_data_file).
  std::string path;
  /// The share of each class that is held out as the test split.
  double test_fraction = 0.2;

  static void describe(config::Schema<DigitsOptions>& schema);
};

/// UCI's handwritten digits: samples [1, 8, 8] in [0, 1], ten classes.
///
/// The split is stratified and depends on nothing but test_fraction: neither on a seed nor on the
/// number of ranks, so that results of different runs compare.
///
/// @throws base::UserError naming file, line and what is wrong there: a missing file, a damaged
///   gzip stream, a line without exactly 64 pixels and a label, a pixel outside 0..16, a label
///   outside 0..9.
std::shared_ptr<const Dataset> load_digits(const DigitsOptions& options, Split split);

}  // namespace syncbn::data
