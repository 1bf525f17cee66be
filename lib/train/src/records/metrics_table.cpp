#include "records/metrics_table.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/append_file.h"
#include "common/csv.h"

namespace syncbn::train {
namespace {

// Upper bound on buffered bytes of rows: a resumed run adds the rows of its whole log.
constexpr size_t kMaxWaiting = 65536;

}  // namespace

MetricsTable::MetricsTable(std::filesystem::path file)
    : file_(std::move(file)), columns_({"event", "time", "epoch", "step"}) {}

void MetricsTable::add(const LogRecord& record) {
  std::vector<std::string> added;
  for (const auto& [name, value] : record.values) {
    if (!numbers_.contains(name)) added.push_back(name);
  }
  if (!added.empty()) widen(added);
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
  const bool is_new = !has_begun_ || base::is_missing(file_);  // someone may have removed it
  if (!is_new && rows_.empty()) return;
  std::error_code ignored;
  if (!has_begun_) std::filesystem::remove(file_, ignored);
  append_to_file(file_, (is_new ? header() : "") + std::exchange(rows_, {}));
  has_begun_ = true;
}

std::string MetricsTable::header() const {
  std::vector<std::string> fields;
  for (const std::string& column : columns_) fields.push_back(csv_field(column));
  return base::join(fields, ",") + "\n";
}

void MetricsTable::widen(const std::vector<std::string>& added) {
  write();
  const size_t before = columns_.size();
  for (const std::string& name : added) {
    if (numbers_.try_emplace(name, columns_.size()).second) columns_.push_back(name);
  }
  const std::string fields = std::string(columns_.size() - before, ',') + "\n";
  base::write_file_atomically(file_, [&](const std::filesystem::path& file) {
    std::ifstream former(file_, std::ios::binary);
    std::ofstream to(file, std::ios::binary);
    to << header();
    std::string row;
    std::getline(former, row);  // the former header
    while (std::getline(former, row)) to << row << fields;
    if (!to.flush()) base::throw_file_error(fmt::format("cannot write {}", file_.string()), errno);
  });
}

}  // namespace syncbn::train
