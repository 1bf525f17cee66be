#include "records/metrics_table.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>

#include "common/append_file.h"
#include "common/csv.h"

namespace syncbn::train {
namespace {

// Bytes of rows that wait for write(), at most: a resumed run adds those of its whole log.
constexpr size_t kMaxWaiting = 65536;

}  // namespace

MetricsTable::MetricsTable(std::filesystem::path file)
    : file_(std::move(file)), columns_({"event", "time", "epoch", "step"}) {
  std::error_code ignored;
  std::filesystem::remove(file_, ignored);
  rows_ = header();
}

void MetricsTable::add(const LogRecord& record) {
  const size_t before = columns_.size();
  for (const auto& [name, value] : record.values) {
    if (numbers_.try_emplace(name, columns_.size()).second) columns_.push_back(name);
  }
  if (columns_.size() > before) widen(columns_.size() - before);
  fmt::format_to(std::back_inserter(rows_), "{},{:.3f},{},{}", record.event, record.time,
                 record.epoch, record.step);
  std::vector<std::pair<size_t, double>> fields;
  for (const auto& [name, value] : record.values) {
    if (!std::isnan(value)) fields.emplace_back(numbers_.at(name), value);
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
  if (!rows_.empty()) append_to_file(file_, std::exchange(rows_, {}));
}

std::string MetricsTable::header() const {
  std::vector<std::string> fields;
  for (const std::string& column : columns_) fields.push_back(csv_field(column));
  return base::join(fields, ",") + "\n";
}

void MetricsTable::widen(size_t added) {
  write();
  std::istringstream former(base::read_file(file_));
  std::string text = header();
  std::string row;
  std::getline(former, row);  // the former header
  while (std::getline(former, row)) text += row + std::string(added, ',') + "\n";
  base::write_file_atomically(file_, text);
}

}  // namespace syncbn::train
