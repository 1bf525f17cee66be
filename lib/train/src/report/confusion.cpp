#include "report/confusion.h"

#include <syncbn/base/text.h>

#include <algorithm>
#include <map>

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

constexpr size_t kMaxClasses = 30;
constexpr size_t kMaxMistakes = 50;
constexpr int64_t kMaxCount = int64_t{1} << 40;  // sums of the counts in a file do not overflow

struct Cell {
  std::string label;
  std::string answer;
  int64_t count = 0;
};

/// The cells with a count, from either form of the table.
std::vector<Cell> cells_of(const std::vector<Row>& rows) {
  std::vector<Cell> cells;
  const Row& header = rows.front();
  const bool is_list = header == Row{"label", "answer", "count"};
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].size() != header.size()) return {};
    const bool is_class = std::find(header.begin() + 1, header.end(), rows[i][0]) != header.end();
    if (!is_list && !is_class) return {};
    for (size_t k = is_list ? 2 : 1; k < header.size(); ++k) {
      const auto count = base::parse_number<int64_t>(rows[i][k]);
      if (!count || *count > kMaxCount) return {};
      if (*count > 0) cells.push_back({rows[i][0], is_list ? rows[i][1] : header[k], *count});
    }
  }
  return cells;
}

Json matrix(const std::vector<Cell>& cells, const std::vector<std::string>& classes) {
  std::vector<std::vector<int64_t>> rows(classes.size(), std::vector<int64_t>(classes.size()));
  const auto place = [&](const std::string& name) {
    return static_cast<size_t>(std::ranges::find(classes, name) - classes.begin());
  };
  for (const Cell& cell : cells) rows[place(cell.label)][place(cell.answer)] = cell.count;
  return {{"classes", classes}, {"rows", rows}};
}

Json mistakes(std::vector<Cell> cells) {
  std::map<std::string, int64_t> samples;
  for (const Cell& cell : cells) samples[cell.label] += cell.count;
  std::erase_if(cells, [](const Cell& cell) { return cell.label == cell.answer; });
  std::ranges::stable_sort(cells, std::ranges::greater(), &Cell::count);
  cells.resize(std::min(cells.size(), kMaxMistakes));
  Json list = Json::array();
  for (const Cell& cell : cells) {
    list.push_back({cell.label, cell.answer, cell.count, samples[cell.label]});
  }
  return {{"mistakes", list}};
}

}  // namespace

Json confusion_json(const std::vector<Row>& rows) {
  if (rows.size() < 2 || rows.front().size() < 2) return nullptr;
  std::vector<Cell> cells = cells_of(rows);
  if (cells.empty()) return nullptr;
  const bool is_list = rows.front().front() == "label";
  const std::vector<std::string> classes(rows.front().begin() + 1, rows.front().end());
  if (is_list || classes.size() > kMaxClasses) return mistakes(std::move(cells));
  return matrix(cells, classes);
}

}  // namespace syncbn::train
