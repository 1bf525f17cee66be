#include "report/number_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <span>

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

template <class Combine>
double combined(std::span<const double> values, const Combine& combine) {
  double result = kAbsent;
  for (const double value : values) {
    if (std::isnan(value)) continue;
    result = std::isnan(result) ? value : combine(result, value);
  }
  return result;
}

double mean_of(std::span<const double> values) {
  const auto present = std::ranges::count_if(values, [](double x) { return !std::isnan(x); });
  return combined(values, std::plus<>()) / static_cast<double>(present);
}

double last_of(std::span<const double> values) {
  return values.back();
}

}  // namespace

Json rounded(double value) {
  if (!std::isfinite(value)) return nullptr;
  constexpr double kMaxExact = 1e15;
  if (value == std::floor(value) && std::abs(value) < kMaxExact) {
    return static_cast<int64_t>(value);
  }
  std::array<char, 32> text{};
  *fmt::format_to_n(text.data(), text.size() - 1, "{:.6g}", value).out = '\0';
  return std::strtod(text.data(), nullptr);
}

double last_number(const std::vector<double>& values) {
  const auto last =
      std::find_if(values.rbegin(), values.rend(), [](double x) { return !std::isnan(x); });
  return last == values.rend() ? kAbsent : *last;
}

void NumberTable::add(const Json& line) {
  size_t place = 0;
  for (const auto& [name, value] : line.items()) {
    // JSON has no NaN: it is written as null.
    if (!value.is_number() && !value.is_null()) continue;
    Column& own = column(name, place++);
    own.values.resize(rows_, kAbsent);
    own.values.push_back(value.is_null() ? kAbsent : value.get<double>());
  }
  ++rows_;
  for (Column& own : columns_) own.values.resize(rows_, kAbsent);
}

/// @param expected the index of the column if the lines are alike
NumberTable::Column& NumberTable::column(std::string_view name, size_t expected) {
  if (expected < columns_.size() && columns_[expected].name == name) return columns_[expected];
  const auto found = std::ranges::find(columns_, name, &Column::name);
  if (found != columns_.end()) return *found;
  columns_.push_back({std::string(name), {}});
  return columns_.back();
}

const std::vector<double>* NumberTable::find(std::string_view name) const {
  const auto found = std::ranges::find(columns_, name, &Column::name);
  return found == columns_.end() ? nullptr : &found->values;
}

void NumberTable::remove(std::string_view name) {
  std::erase_if(columns_, [&](const Column& column) { return column.name == name; });
}

NumberTable NumberTable::thinned(size_t rows) const {
  if (rows_ <= rows) return *this;
  NumberTable result;
  result.rows_ = rows;
  const auto add_column = [&](const std::string& name, const std::vector<double>& values,
                              const auto& value_of) {
    result.columns_.push_back({name, {}});
    std::vector<double>& added = result.columns_.back().values;
    for (size_t i = 0; i < rows; ++i) {
      const size_t begin = i * rows_ / rows;
      const size_t end = (i + 1) * rows_ / rows;
      added.push_back(value_of(std::span(values).subspan(begin, end - begin)));
    }
  };
  for (const Column& column : columns_) {
    const bool is_position = column.name == "step" || column.name == "epoch";
    add_column(column.name, column.values, is_position ? last_of : mean_of);
  }
  const std::vector<double>* const loss = find("loss");
  if (loss == nullptr) return result;
  add_column("loss_min", *loss, [](std::span<const double> values) {
    return combined(values, [](double a, double b) { return std::min(a, b); });
  });
  add_column("loss_max", *loss, [](std::span<const double> values) {
    return combined(values, [](double a, double b) { return std::max(a, b); });
  });
  return result;
}

Json NumberTable::json() const {
  Json json = Json::object();
  for (const Column& column : columns_) {
    Json values = Json::array();
    for (const double value : column.values) values.push_back(rounded(value));
    json[column.name] = std::move(values);
  }
  return json;
}

}  // namespace syncbn::train
