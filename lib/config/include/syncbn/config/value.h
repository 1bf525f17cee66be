#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>

namespace syncbn::config {

/// What a user wrote, for a message: its beginning and "…" when it is long.
inline std::string shortened(std::string_view text) {
  constexpr size_t kMost = 60;  // bytes
  if (text.size() <= kMost) return std::string(text);
  size_t end = kMost;
  // Not in the middle of a character of several bytes.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80) --end;
  return std::string(text.substr(0, end)) + "…";
}

/// Where a piece of configuration was written: "configs/digits.yaml:12:3" or "--epochs".
struct Mark {
  std::shared_ptr<const std::string> source;  ///< a file's path, or an option's spelling
  int line = 0;                               ///< from 1; 0 when the source has no lines
  int column = 0;                             ///< from 1

  std::string str() const {
    if (!source) return "";
    return line > 0 ? fmt::format("{}:{}:{}", *source, line, column) : *source;
  }
};

/// Configuration as it was written, before any type is known: YAML files and command lines both
/// become this, and resolved options are written back to it.
struct Value {
  enum class Kind { kNull, kScalar, kList, kMap };
  struct Member;

  Kind kind = Kind::kNull;
  std::string scalar;           ///< kScalar
  bool quoted = false;          ///< kScalar: written in quotes, so never a number, bool or null
  std::vector<Value> list;      ///< kList
  std::vector<Member> members;  ///< kMap, in the order written
  Mark mark;

  // Defined below: a Value can be made only where Member is complete.
  inline static Value of_scalar(std::string text, bool quoted = false);
  inline static Value of_map();

  inline const Value* find(const std::string& key) const;
  inline void set(const std::string& key, Value value);

  /// In words, for messages: "the list", "'abc'".
  std::string str() const {
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
};

struct Value::Member {
  std::string key;
  Mark mark;  ///< of the key
  Value value;
};

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

const Value* Value::find(const std::string& key) const {
  const auto it = std::find_if(members.begin(), members.end(),
                               [&](const Member& member) { return member.key == key; });
  return it == members.end() ? nullptr : &it->value;
}

void Value::set(const std::string& key, Value value) {
  const auto it = std::find_if(members.begin(), members.end(),
                               [&](const Member& member) { return member.key == key; });
  if (it != members.end()) {
    it->value = std::move(value);
  } else {
    members.push_back({key, value.mark, std::move(value)});
  }
}

/// All that is wrong with a configuration, so that it can be said at once.
class Faults {
 public:
  void add(const Mark& mark, const std::string& message) {
    const std::string where = mark.str();
    messages_.push_back(where.empty() ? message : where + ": " + message);
  }
  bool empty() const { return messages_.empty(); }
  const std::vector<std::string>& messages() const { return messages_; }

  /// @throws base::UserError with all messages, a line each, if there are any.
  void throw_if_any() const {
    if (messages_.empty()) return;
    std::string all = messages_.front();
    for (size_t i = 1; i < messages_.size(); ++i) all += "\n  " + messages_[i];
    throw base::UserError(all);
  }

 private:
  std::vector<std::string> messages_;
};

}  // namespace syncbn::config
