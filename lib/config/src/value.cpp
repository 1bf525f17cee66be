#include <syncbn/config/value.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <utility>

namespace syncbn::config {

std::string shortened(std::string_view text) {
  constexpr size_t kMaxBytes = 60;
  if (text.size() <= kMaxBytes) return std::string(text);
  return std::string(base::utf8_prefix(text, kMaxBytes)) + "…";
}

std::string Mark::str() const {
  if (!source) return "";
  return line > 0 ? fmt::format("{}:{}:{}", *source, line, column) : *source;
}

Value Value::of_scalar(std::string text, bool quoted) {
  Value value;
  value.kind = Kind::kScalar;
  value.scalar = std::move(text);
  value.quoted = quoted;
  return value;
}

Value Value::of_map() {
  Value value;
  value.kind = Kind::kMap;
  return value;
}

Value* Value::find(const std::string& key) {
  const auto it = std::ranges::find(members, key, &Member::key);
  return it == members.end() ? nullptr : &it->value;
}

void Value::set(const std::string& key, Value value) {
  if (Value* present = find(key)) {
    *present = std::move(value);
  } else {
    members.push_back({key, value.mark, std::move(value)});
  }
}

std::string Value::str() const {
  switch (kind) {
    case Kind::kNull:
      return "nothing";
    case Kind::kScalar:
      return fmt::format("'{}'", shortened(scalar));
    case Kind::kList:
      return "a list";
    case Kind::kMap:
      return "a section";
  }
  return "?";
}

void Faults::add(const Mark& mark, const std::string& message) {
  const std::string where = mark.str();
  messages_.push_back(where.empty() ? message : where + ": " + message);
}

void Faults::throw_if_any() const {
  constexpr size_t kMaxShown = 20;
  if (messages_.empty()) return;
  std::vector<std::string> shown = messages_;
  if (messages_.size() > kMaxShown) {
    shown.resize(kMaxShown);
    shown.push_back(fmt::format("and {} more", messages_.size() - kMaxShown));
  }
  throw base::UserError(base::join(shown, "\n  "));
}

}  // namespace syncbn::config
