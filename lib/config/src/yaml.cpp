#include <syncbn/config/yaml.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/codec.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>
#include <string_view>

namespace syncbn::config {
namespace {

// Upper bounds on nesting and on the number of values, so that aliases cannot expand without end.
constexpr int kMaxDepth = 100;
constexpr int kMaxValues = 10'000;

using Source = std::shared_ptr<const std::string>;

Mark mark_of(const YAML::Mark& mark, const Source& source) {
  if (mark.is_null()) return {source};
  return {source, mark.line + 1, mark.column + 1};
}

[[noreturn]] void fail(const Mark& mark, const std::string& message) {
  throw base::UserError(mark.str() + ": " + message);
}

/// `text` from line `number` on, counted from 1.
std::string_view from_line(std::string_view text, int number) {
  for (int line = 1; line < number; ++line) {
    const size_t end = text.find('\n');
    if (end == text.npos) return "";
    text.remove_prefix(end + 1);
  }
  return text;
}

std::string_view line_of(std::string_view text, int number) {
  const std::string_view rest = from_line(text, number);
  return rest.substr(0, rest.find('\n'));
}

std::string syntax_advice(std::string_view message, std::string_view line) {
  if (line.substr(0, line.find_first_not_of(" \t")).find('\t') != line.npos) {
    return "; a tab indents this line, where YAML allows only spaces";
  }
  if (line.find("${") != line.npos) {
    return "; between brackets a reference needs quotes: \"${...}\"";
  }
  if (message == YAML::ErrorMsg::MAP_VALUE) {
    return "; every ':' after a key needs a blank behind it, keys of a section begin in the same "
           "column, and a text with ': ' needs quotes";
  }
  if (message == YAML::ErrorMsg::END_OF_MAP) return "; keys of a section begin in the same column";
  if (message == YAML::ErrorMsg::UNKNOWN_TOKEN || message == YAML::ErrorMsg::UNKNOWN_ANCHOR) {
    return "; a text that begins with this character needs quotes";
  }
  return "";
}

/// Whether text is UTF-16 or UTF-32, which yaml-cpp can read.
bool has_wide_characters(std::string_view text) {
  using namespace std::string_view_literals;
  return text.starts_with("\xff\xfe"sv) || text.starts_with("\xfe\xff"sv) ||
         text.starts_with("\0\0\xfe\xff"sv);
}

[[noreturn]] void fail_size(const Mark& mark) {
  fail(mark, "nested too deep or too large (does an alias contain itself?)");
}

/// Refuses a text of too many values before yaml-cpp makes a node of about 1 kB for each.
class SizeCheck : public YAML::EventHandler {
 public:
  explicit SizeCheck(Source source) : source_(std::move(source)) {}

  void OnDocumentStart(const YAML::Mark& /*mark*/) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t /*anchor*/) override { count(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t /*anchor*/) override { count(mark); }
  void OnScalar(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                const std::string& /*value*/) override {
    count(mark);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& /*tag*/,
                       YAML::anchor_t /*anchor*/, YAML::EmitterStyle::value /*style*/) override {
    count(mark);
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                  YAML::EmitterStyle::value /*style*/) override {
    count(mark);
  }
  void OnMapEnd() override {}

 private:
  void count(const YAML::Mark& mark) {
    if (++values_ > 2 * kMaxValues) fail_size(mark_of(mark, source_));  // keys count as well
  }

  Source source_;
  int values_ = 0;
};

/// Whether text has only characters without a special meaning in YAML.
bool is_one_word(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) ||
           std::string_view("_-./+").find(static_cast<char>(c)) != std::string_view::npos;
  });
}

class Converter {
 public:
  /// @param text the YAML text, to look up marks; empty if it is not in UTF-8
  Converter(std::string_view text, Source source) : text_(text), source_(std::move(source)) {}

  Value convert(const YAML::Node& node, int depth = 0) {
    Value value;
    value.mark = mark_of(node.Mark(), source_);
    if (depth > kMaxDepth || ++values_ > kMaxValues) fail_size(value.mark);
    switch (node.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        value.kind = Value::Kind::kScalar;
        value.scalar = node.Scalar();
        // yaml-cpp tags plain scalars "?", and quoted and block ones "!". A tag in the file
        // replaces both.
        value.quoted = node.Tag() == "!" || (node.Tag() != "?" && !is_one_word(value.scalar));
        if (value.quoted && !is_closed(value.mark)) fail(value.mark, "this quote is not closed");
        break;
      case YAML::NodeType::Sequence:
        value.kind = Value::Kind::kList;
        for (const YAML::Node& item : node) value.list.push_back(convert(item, depth + 1));
        break;
      case YAML::NodeType::Map:
        value.kind = Value::Kind::kMap;
        convert_members(node, value, depth);
        break;
    }
    return value;
  }

 private:
  /// False if the closing quote is missing: yaml-cpp accepts the end of the file instead.
  bool is_closed(const Mark& mark) const {
    if (mark.line == 0) return true;
    std::string_view rest = from_line(text_, mark.line);
    rest.remove_prefix(std::min(rest.size(), static_cast<size_t>(mark.column - 1)));
    // An anchor or a tag may precede the quote.
    while (rest.starts_with('&') || rest.starts_with('!')) {
      rest.remove_prefix(std::min(rest.find_first_of(" \n"), rest.size()));
      rest.remove_prefix(std::min(rest.find_first_not_of(" \n"), rest.size()));
    }
    if (!rest.starts_with('"') && !rest.starts_with('\'')) return true;
    for (size_t i = 1; i < rest.size(); ++i) {
      const bool is_escape = rest[0] == '"' ? rest[i] == '\\' : rest.substr(i).starts_with("''");
      if (is_escape) {
        ++i;  // the escaped character may be a quote
      } else if (rest[i] == rest[0]) {
        return true;
      }
    }
    return false;
  }

  void convert_members(const YAML::Node& node, Value& value, int depth) {
    std::vector<Value> merged;
    for (const auto& member : node) {
      const YAML::Node& key = member.first;
      const YAML::Node& content = member.second;
      const Mark mark = mark_of(key.Mark(), source_);
      if (!key.IsScalar()) fail(mark, "a key must be plain text");
      if (key.Scalar() == "<<" && key.Tag() != "!") {
        merged.push_back(convert(content, depth + 1));
        continue;
      }
      for (const Value::Member& earlier : value.members) {
        if (earlier.key != key.Scalar()) continue;
        fail(mark, fmt::format("the key '{}' is already set at line {}", shortened(earlier.key),
                               earlier.mark.line));
      }
      Value converted = convert(content, depth + 1);
      // yaml-cpp puts the mark of an empty value at the next key.
      if (converted.kind == Value::Kind::kNull) converted.mark = mark;
      value.members.push_back({key.Scalar(), mark, std::move(converted)});
    }
    for (const Value& source : merged) merge(source, value);
  }

  /// Adds the members of `from` that `into` lacks.
  static void merge(const Value& from, Value& into) {
    if (from.kind == Value::Kind::kList) {
      for (const Value& item : from.list) merge(item, into);
      return;
    }
    if (from.kind != Value::Kind::kMap) {
      fail(from.mark, "'<<' merges sections, got " + from.str());
    }
    for (const Value::Member& member : from.members) {
      if (into.find(member.key) == nullptr) into.members.push_back(member);
    }
  }

  std::string_view text_;
  Source source_;
  int values_ = 0;
};

/// Whether text needs no quotes: no reader parses it as a number, a bool or null.
bool is_plain(std::string_view text) {
  if (!is_one_word(text) || std::string_view("-.+0123456789").find(text[0]) != text.npos) {
    return false;
  }
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  // Readers of YAML 1.1 or 1.2 parse these as true, false or null.
  const auto words = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"};
  return std::ranges::count(words, lower) == 0;
}

// Not YAML::Emitter, which replaces bytes that are not UTF-8; paths may contain such bytes.
std::string in_quotes(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return '"' + out + '"';
}

std::string text_of(const std::string& text) {
  return is_plain(text) ? text : in_quotes(text);
}

/// @param between_brackets whether the text is inside [] or {}, where more texts need quotes
std::string scalar_text(const Value& value, bool between_brackets) {
  if (value.quoted) return text_of(value.scalar);
  // The file had the text on several lines, or where these characters have no special meaning.
  const bool is_unclear =
      value.scalar.find_first_of(between_brackets ? "\n,?[]{}" : "\n") != std::string::npos;
  return is_unclear ? in_quotes(value.scalar) : value.scalar;
}

/// On one line: `[1, 2]`, `{type: sgd}`.
std::string flow(const Value& value, bool between_brackets = false) {
  std::vector<std::string> items;
  for (const Value& item : value.list) items.push_back(flow(item, true));
  for (const Value::Member& member : value.members) {
    items.push_back(text_of(member.key) + ": " + flow(member.value, true));
  }
  if (value.kind == Value::Kind::kNull) return "null";
  if (value.kind == Value::Kind::kScalar) return scalar_text(value, between_brackets);
  const std::string all = base::join(items, ", ");
  return value.kind == Value::Kind::kList ? "[" + all + "]" : "{" + all + "}";
}

std::string syntax_message(const YAML::Exception& error, std::string_view line) {
  if (error.msg == YAML::ErrorMsg::EOF_IN_SCALAR) return "this quote is not closed";
  // yaml-cpp reports too deep nesting in this way.
  if (error.msg == YAML::ErrorMsg::BAD_FILE) return "nested too deep";
  return "YAML syntax: " + error.msg + syntax_advice(error.msg, line);
}

void add_changes(const Value& before, const Value& after, const std::string& path,
                 std::vector<Change>& out) {
  // `loss: bce` is short for `loss: {type: bce}`.
  if (before.kind == Value::Kind::kScalar && after.kind == Value::Kind::kMap) {
    const Value* const type = after.find("type");
    if (type != nullptr) return add_changes(before, *type, path + ".type", out);
  }
  if (before.kind != Value::Kind::kMap || after.kind != Value::Kind::kMap) {
    Change change{path, flow(before), flow(after)};
    if (change.before != change.after) out.push_back(std::move(change));
    return;
  }
  for (const Value::Member& member : before.members) {
    const Value* other = after.find(member.key);
    if (other == nullptr) continue;
    add_changes(member.value, *other, detail::at(path, member.key), out);
  }
}

void add_flattened(const Value& value, const std::string& path,
                   std::vector<std::pair<std::string, std::string>>& out) {
  if (value.kind != Value::Kind::kMap) {
    out.emplace_back(path, flow(value));
    return;
  }
  for (const Value::Member& member : value.members) {
    add_flattened(member.value, detail::at(path, member.key), out);
  }
}

/// The files and lines, or options, that set a value.
/// @param origin null: none of them does
std::string origins_of(const Value* origin) {
  std::set<std::string> origins;
  const auto add = [&origins](const Value& value) {
    const Mark& mark = value.mark;
    if (!mark.source || value.kind == Value::Kind::kMap) return;
    origins.insert(mark.line > 0 ? fmt::format("{}:{}", *mark.source, mark.line) : *mark.source);
  };
  if (origin != nullptr) for_each_value(*origin, add);
  return origins.empty() ? "default" : fmt::format("{}", fmt::join(origins, ", "));
}

/// @param origins the marks of the members; null: write no comments
void write_members(const Value& value, const Value* origins, int indent, std::string& out) {
  constexpr size_t kCommentColumn = 40;
  const Value nowhere;
  for (const Value::Member& member : value.members) {
    const Value* origin = origins == nullptr ? nullptr : origins->find(member.key);
    // `optimizer: sgd` sets optimizer.type.
    const bool is_short = origins != nullptr && origins->kind == Value::Kind::kScalar;
    if (is_short && member.key == "type") origin = origins;
    std::string line(static_cast<size_t>(indent), ' ');
    line += text_of(member.key) + ":";
    if (member.value.kind == Value::Kind::kMap && !member.value.members.empty()) {
      out += line + '\n';
      const Value* const below = origin == nullptr ? &nowhere : origin;
      write_members(member.value, origins == nullptr ? nullptr : below, indent + 2, out);
      continue;
    }
    line += " " + flow(member.value);
    if (origins != nullptr) {
      line = fmt::format("{:<{}}  # {}", line, kCommentColumn, origins_of(origin));
    }
    out += line + '\n';
  }
}

std::string write_yaml(const Value& value, const Value* origins) {
  if (value.kind != Value::Kind::kMap || value.members.empty()) return flow(value) + "\n";
  std::string out;
  write_members(value, origins, 0, out);
  return out;
}

}  // namespace

Value parse_yaml(const std::string& given, const std::string& source) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  const auto name = std::make_shared<const std::string>(source);
  const bool is_wide = has_wide_characters(given);
  if (!is_wide && given.find('\0') != given.npos) {
    fail({name}, "this is not YAML: it contains bytes that are 0");
  }
  const std::string text =
      given.substr(given.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0);
  try {
    std::istringstream stream(text);
    SizeCheck check(name);
    for (YAML::Parser parser(stream); parser.HandleNextDocument(check);) {
    }
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      fail(mark_of(documents[1].Mark(), name), "a second document ('---') starts; one is expected");
    }
    if (!documents.empty()) {
      return Converter(is_wide ? std::string_view() : text, name).convert(documents[0]);
    }
  } catch (const YAML::Exception& error) {
    const Mark mark = mark_of(error.mark, name);
    fail(mark, syntax_message(error, line_of(text, mark.line)));
  }
  Value nothing;
  nothing.mark = {name};
  return nothing;
}

std::string read_yaml(const std::filesystem::path& path) {
  constexpr size_t kMaxFileBytes = 1 << 17;
  return base::read_file(path, kMaxFileBytes);
}

Value load_yaml(const std::filesystem::path& path) {
  return parse_yaml(read_yaml(path), path.string());
}

std::string Change::str() const {
  return fmt::format("{} {} (was {})", path, after, before);
}

std::vector<Change> changes(const Value& before, const Value& after) {
  std::vector<Change> all;
  add_changes(before, after, "", all);
  return all;
}

std::vector<std::pair<std::string, std::string>> flattened(const Value& value) {
  std::vector<std::pair<std::string, std::string>> all;
  add_flattened(value, "", all);
  return all;
}

std::string to_yaml(const Value& value) {
  return write_yaml(value, nullptr);
}

std::string to_yaml(const Value& value, const Value& origins) {
  return write_yaml(value, &origins);
}

}  // namespace syncbn::config
