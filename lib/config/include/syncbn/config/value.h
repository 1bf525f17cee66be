#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::config {

/// A user's text for a message, on one line of at most 60 characters: "…" replaces the rest.
std::string shortened(std::string_view text);

/// Where a piece of configuration was written: "configs/digits.yaml:12:3" or "--epochs".
struct Mark {
  std::shared_ptr<const std::string> source;  ///< a file's path, or an option's spelling
  int line = 0;                               ///< from 1; 0 when the source has no lines
  int column = 0;                             ///< from 1

  std::string str() const;
};

/// An untyped configuration: what a YAML file or a command line contains, or an option struct
/// writes.
struct Value {
  enum class Kind { kNull, kScalar, kList, kMap };
  struct Member;

  Kind kind = Kind::kNull;
  std::string scalar;           ///< kScalar
  bool quoted = false;          ///< kScalar: written in quotes, so never a number, bool or null
  bool is_unresolved = false;   ///< kScalar: has a reference without a value, already reported
  std::vector<Value> list;      ///< kList
  std::vector<Member> members;  ///< kMap, in the order written
  Mark mark;

  static Value of_scalar(std::string text, bool quoted = false);
  static Value of_text(std::string text);
  static Value of_map();

  Value* find(const std::string& key);
  const Value* find(const std::string& key) const { return const_cast<Value*>(this)->find(key); }
  /// The value of a key of a section in a section: "optimizer.lr". Null without it.
  const Value* at(const std::string& path) const;
  void set(const std::string& key, Value value);

  /// For messages: "a list", "'abc'".
  std::string str() const;
};

struct Value::Member {
  std::string key;
  Mark mark;  ///< of the key
  Value value;
};

/// Calls `visit` with a value, then with its items and the values of its members, to any depth.
template <class AnyValue, class Visit>
void for_each_value(AnyValue& value, const Visit& visit) {
  visit(value);
  for (auto& item : value.list) for_each_value(item, visit);
  for (auto& member : value.members) for_each_value(member.value, visit);
}

/// Collects all mistakes of a configuration, to report them in one message.
class Faults {
 public:
  /// Sorts the messages about a file by line. If `message` begins with the key that the option at
  /// `mark` sets, drops the key.
  void add(const Mark& mark, const std::string& message);
  /// Whether throw_if_any() would only count further messages.
  bool is_full() const;
  bool empty() const { return messages_.empty(); }
  const std::vector<std::string>& messages() const { return messages_; }

  /// @throws base::UserError with all messages, one per line, if there are any.
  void throw_if_any() const;

 private:
  std::vector<std::string> messages_;
  std::vector<Mark> marks_;  ///< of each message
};

}  // namespace syncbn::config
