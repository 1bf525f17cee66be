#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::train {

/// Lines of a log as columns: one for each key that has a number in any line. NaN for lines without
/// it.
class NumberTable {
 public:
  struct Column {
    std::string name;
    std::vector<double> values;
  };

  void add(const nlohmann::ordered_json& line);

  size_t rows() const { return rows_; }
  /// In the order of their first appearance.
  const std::vector<Column>& columns() const { return columns_; }
  /// Null if there is no such column.
  const std::vector<double>* find(std::string_view name) const;
  void remove(std::string_view name);

  /// At most `rows` rows. If there are more, each row stands for successive ones: it has their
  /// means, but the last values of `step` and `epoch`. Columns `loss_min` and `loss_max` are then
  /// added for `loss`.
  NumberTable thinned(size_t rows) const;

  /// {"step": [1, 2], "loss": [0.5, null]}, with six significant digits.
  nlohmann::ordered_json json() const;

 private:
  Column& column(std::string_view name, size_t expected);

  std::vector<Column> columns_;
  size_t rows_ = 0;
};

/// The last value that is not NaN, or NaN.
double last_number(const std::vector<double>& values);

/// A number with six significant digits, or null for one that is not finite.
nlohmann::ordered_json rounded(double value);

}  // namespace syncbn::train
