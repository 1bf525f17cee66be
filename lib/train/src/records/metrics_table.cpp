#include "records/metrics_table.h"

#include <fmt/format.h>
#include <syncbn/base/open_file.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/append_file.h"
#include "common/csv.h"

namespace syncbn::train {

// Upper bound on buffered bytes of rows: a resumed run adds the rows of its whole log.
constexpr size_t kMaxWaiting = 65536;

MetricsTable::MetricsTable(std::filesystem::path file)
    : file_(std::move(file)), columns_({"event", "time", "epoch", "step"}) {}

void MetricsTable::add_columns(const LogRecord& record) {
  for (const auto& [name, value] : record.values) {
    if (numbers_.try_emplace(name, columns_.size()).second) columns_.push_back(name);
  }
}

void MetricsTable::add(const LogRecord& record) {
  fmt::format_to(std::back_inserter(rows_), "{},{:.3f},{},{}", record.event, record.time,
                 record.epoch, record.step);
  std::vector<std::pair<size_t, double>> fields;
  for (const auto& [name, value] : record.values) {
    const auto column = numbers_.find(name);
    if (column != numbers_.end() && !std::isnan(value)) fields.emplace_back(column->second, value);
  }
  std::ranges::sort(fields);
  size_t at = 3;  // the last column that every row fills
  for (const auto& [column, value] : fields) {
    rows_.append(column - at, ',');
    fmt::format_to(std::back_inserter(rows_), "{}", value);
    at = column;
  }
  rows_.append(columns_.size() - 1 - at, ',');
  rows_ += '\n';
  if (rows_.size() > kMaxWaiting) write();
}

void MetricsTable::write() {
  const bool is_new = !has_begun_ || base::is_missing(file_);  // someone may have removed it
  if (!is_new && rows_.empty()) return;
  std::error_code ignored;
  if (!has_begun_) std::filesystem::remove(file_, ignored);
  append_to_file(file_, (is_new ? csv_line(columns_) : "") + std::exchange(rows_, {}));
  has_begun_ = true;
}

}  // namespace syncbn::train
