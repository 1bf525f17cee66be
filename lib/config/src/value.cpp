#include <syncbn/config/value.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <utility>

namespace syncbn::config {

namespace {

constexpr size_t kMaxShown = 20;

/// The key that an option sets: "--batch-size" sets batch_size.
std::string key_of(std::string option) {
  if (option.starts_with("--")) option.erase(0, 2);
  std::ranges::replace(option, '-', '_');
  return option;
}

}  // namespace

std::string shortened(std::string_view text) {
  constexpr int kColumns = 60;
  std::string line;
  for (const char c : text) c == '\n' ? line.append("\\n") : line.append(1, c);
  return base::shortened(line, kColumns);
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

Value Value::of_text(std::string text) {
  return of_scalar(std::move(text), /*quoted=*/true);
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

const Value* Value::at(const std::string& path) const {
  const size_t dot = path.find('.');
  const Value* const first = find(path.substr(0, dot));
  return first == nullptr || dot == path.npos ? first : first->at(path.substr(dot + 1));
}

void Value::set(const std::string& key, Value value) {
  if (Value* present = find(key)) {
    *present = std::move(value);
  } else {
    members.push_back({key, value.mark, std::move(value)});
  }
}

std::string Value::str() const {
  if (kind == Kind::kScalar) return fmt::format("'{}'", shortened(scalar));
  return kind == Kind::kNull ? "nothing" : kind == Kind::kList ? "a list" : "a section";
}

void Faults::add(const Mark& mark, const std::string& message) {
  const auto is_later = [&](const Mark& other) {
    return mark.line > 0 && other.line > 0 && *other.source == *mark.source &&
           std::pair(other.line, other.column) > std::pair(mark.line, mark.column);
  };
  size_t place = marks_.size();
  while (place > 0 && is_later(marks_[place - 1])) --place;
  const auto at = static_cast<ptrdiff_t>(place);
  marks_.insert(marks_.begin() + at, mark);
  const std::string where = mark.str();
  // A message about the key that the option sets, or about a part of that key, does not repeat it:
  // "--model.type: unknown" instead of "--model: model.type: unknown".
  const std::string key = mark.line > 0 ? "" : key_of(where);
  const bool repeats = !key.empty() && message.starts_with(key) &&
                       message.find_first_of(":.[", key.size()) == key.size();
  const std::string separator = where.empty() || repeats ? "" : ": ";
  messages_.insert(messages_.begin() + at,
                   where + separator + (repeats ? message.substr(key.size()) : message));
}

bool Faults::is_full() const {
  return messages_.size() >= kMaxShown;
}

void Faults::throw_if_any() const {
  if (!messages_.empty()) throw base::UserError(base::join_some(messages_, "\n  ", kMaxShown));
}

}  // namespace syncbn::config
