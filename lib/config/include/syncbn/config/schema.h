#pragma once

// Option structs described once: the description drives reading YAML and the command line,
// --help, --print-config, the reference in docs/ and error messages. Header-only and free of
// yaml-cpp, so that lib/data and lib/models describe their options without it.
//
//   struct SgdOptions {
//     double lr = 0.1;
//     bool nesterov = false;
//     static void describe(config::Schema<SgdOptions>& schema) {
//       schema.field("lr", &SgdOptions::lr, "learning rate").above(0);
//       schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
//     }
//   };

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// One line of help or of the reference.
struct FieldInfo {
  std::string path;           ///< "optimizer.lr"
  std::string type;           ///< "number", "integer", "true|false", "text", ...
  std::string default_value;  ///< "0.1"; empty: none
  std::string unit;           ///< "s", "samples"; empty: none
  std::string range;          ///< "above 0"; empty: any
  std::string help;
  std::string only_for;  ///< "type: sgd" where the key exists for one alternative only
  bool required = false;
  /// For the key that chooses between alternatives: their names, and a line about each.
  std::vector<std::pair<std::string, std::string>> alternatives;
};

/// A value, or `auto`: the program chooses.
template <class T>
struct OrAuto {
  std::optional<T> value;  ///< nothing: auto
};

/// What to add to a message about an unknown key; empty: nothing is known about it.
using Hint = std::function<std::string(const std::string& key)>;

template <class T>
class Schema;

/// How a type is read and written. Specialised for bool, integers, floating point, text,
/// std::optional, OrAuto, std::vector, described structs and Component.
template <class T>
struct Codec;

template <class T>
concept Described = requires(Schema<T>& schema) {
  T::describe(schema);
};

namespace detail {

inline std::string at(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

/// The whole of `text` as a number.
template <class Number>
std::optional<Number> parse_number(const std::string& text) {
  Number number{};
  const char* begin = text.data();
  if (text.size() > 1 && *begin == '+') ++begin;
  const auto [stop, error] = std::from_chars(begin, text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return number;
}

inline void wrong_type(const Value& value, const std::string& path, const std::string& wanted,
                       Faults& faults) {
  faults.add(value.mark, fmt::format("{}: expected {}, got {}", path, wanted, value.str()));
}

/// Reads a scalar that must stand without quotes; `parse` gives nothing for what is no T.
template <class T, class Parse>
bool read_plain(const Value& value, T& out, const std::string& path, const std::string& wanted,
                Faults& faults, const Parse& parse) {
  const std::optional<T> parsed =
      value.kind == Value::Kind::kScalar ? parse(value.scalar) : std::nullopt;
  if (parsed && !value.quoted) return out = *parsed, true;
  if (parsed) {
    faults.add(value.mark, fmt::format("{}: expected {}, got the text {}; remove its quotes", path,
                                       wanted, value.str()));
  } else {
    wrong_type(value, path, wanted, faults);
  }
  return false;
}

}  // namespace detail

template <>
struct Codec<bool> {
  static std::string type_name() { return "true|false"; }
  static bool read(const Value& value, bool& out, const std::string& path, Faults& faults) {
    return detail::read_plain(value, out, path, "true or false", faults, parse);
  }
  static Value write(bool in) { return Value::of_scalar(in ? "true" : "false"); }

 private:
  static std::optional<bool> parse(const std::string& text) {
    // The spellings of YAML 1.2; Python's capitals are among them, yes and no are not.
    for (const char* word : {"true", "True", "TRUE"}) {
      if (text == word) return true;
    }
    for (const char* word : {"false", "False", "FALSE"}) {
      if (text == word) return false;
    }
    return std::nullopt;
  }
};

template <class T>
requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) struct Codec<T> {
  static std::string type_name() { return "integer"; }
  static bool read(const Value& value, T& out, const std::string& path, Faults& faults) {
    return detail::read_plain(value, out, path, "an integer", faults, detail::parse_number<T>);
  }
  static Value write(T in) { return Value::of_scalar(fmt::format("{}", in)); }
};

template <class T>
requires std::is_floating_point_v<T>
struct Codec<T> {
  static std::string type_name() { return "number"; }
  static bool read(const Value& value, T& out, const std::string& path, Faults& faults) {
    const auto parse = [](const std::string& text) {
      auto number = detail::parse_number<T>(text);
      if (number && !std::isfinite(*number)) number.reset();
      return number;
    };
    return detail::read_plain(value, out, path, "a finite number", faults, parse);
  }
  static Value write(T in) { return Value::of_scalar(fmt::format("{}", in)); }
};

template <>
struct Codec<std::string> {
  static std::string type_name() { return "text"; }
  static bool read(const Value& value, std::string& out, const std::string& path, Faults& faults) {
    if (value.kind == Value::Kind::kScalar) return out = value.scalar, true;
    detail::wrong_type(value, path, "text", faults);
    return false;
  }
  static Value write(const std::string& in) { return Value::of_scalar(in, /*quoted=*/true); }
};

template <class T>
struct Codec<std::optional<T>> {
  static std::string type_name() { return Codec<T>::type_name() + " or null"; }
  static bool read(const Value& value, std::optional<T>& out, const std::string& path,
                   Faults& faults) {
    if (value.kind == Value::Kind::kNull) return out.reset(), true;
    T inner{};
    if (!Codec<T>::read(value, inner, path, faults)) return false;
    out = std::move(inner);
    return true;
  }
  static Value write(const std::optional<T>& in) { return in ? Codec<T>::write(*in) : Value(); }
};

template <class T>
struct Codec<OrAuto<T>> {
  static std::string type_name() { return Codec<T>::type_name() + " or auto"; }
  static bool read(const Value& value, OrAuto<T>& out, const std::string& path, Faults& faults) {
    if (value.kind == Value::Kind::kScalar && value.scalar == kAuto) return out = {}, true;
    T inner{};
    Faults of_value;
    if (!Codec<T>::read(value, inner, path, of_value)) {
      detail::wrong_type(value, path, fmt::format("one {}", type_name()), faults);
      return false;
    }
    out.value = std::move(inner);
    return true;
  }
  static Value write(const OrAuto<T>& in) {
    return in.value ? Codec<T>::write(*in.value) : Value::of_scalar(kAuto);
  }

 private:
  static constexpr const char* kAuto = "auto";
};

template <class T>
struct Codec<std::vector<T>> {
  static std::string type_name() { return "list of " + Codec<T>::type_name(); }
  static bool read(const Value& value, std::vector<T>& out, const std::string& path,
                   Faults& faults) {
    if (value.kind != Value::Kind::kList) {
      detail::wrong_type(value, path, "a list", faults);
      return false;
    }
    std::vector<T> items;
    bool good = true;
    for (size_t i = 0; i < value.list.size(); ++i) {
      T item{};
      good &= Codec<T>::read(value.list[i], item, fmt::format("{}[{}]", path, i), faults);
      items.push_back(std::move(item));
    }
    if (good) out = std::move(items);
    return good;
  }
  static Value write(const std::vector<T>& in) {
    Value value;
    value.kind = Value::Kind::kList;
    for (const T& item : in) value.list.push_back(Codec<T>::write(item));
    return value;
  }
};

/// The rules of one field; returned by Schema::field to be chained.
template <class M>
class Rules {
 public:
  Rules& at_least(double bound) {
    return number_rule(fmt::format("at least {}", bound), [bound](double x) { return x >= bound; });
  }
  Rules& at_most(double bound) {
    return number_rule(fmt::format("at most {}", bound), [bound](double x) { return x <= bound; });
  }
  Rules& above(double bound) {
    return number_rule(fmt::format("above {}", bound), [bound](double x) { return x > bound; });
  }
  Rules& below(double bound) {
    return number_rule(fmt::format("below {}", bound), [bound](double x) { return x < bound; });
  }
  /// Of a list: how many values it has.
  Rules& length(size_t count) {
    length_ = count;
    return *this;
  }
  Rules& one_of(std::vector<std::string> choices) {
    choices_ = std::move(choices);
    return *this;
  }
  Rules& unit(std::string text) {
    unit_ = std::move(text);
    return *this;
  }
  Rules& required() {
    required_ = true;
    return *this;
  }

 private:
  template <class T>
  friend class Schema;

  struct Rule {
    std::string text;
    std::function<bool(double)> holds;
  };

  Rules& number_rule(std::string text, std::function<bool(double)> holds) {
    numbers_.push_back({std::move(text), std::move(holds)});
    return *this;
  }

  std::string range() const {
    return length_ ? fmt::format("{} values, each {}", *length_, bounds()) : bounds();
  }

  std::string bounds() const {
    if (!choices_.empty()) return "one of " + base::join(choices_, ", ");
    std::vector<std::string> texts;
    for (const Rule& rule : numbers_) texts.push_back(rule.text);
    return base::join(texts, ", ");
  }

  template <class X>
  bool check(const X& value, const Mark& mark, const std::string& path, Faults& faults) const {
    if constexpr (std::is_arithmetic_v<X>) {
      for (const Rule& rule : numbers_) {
        if (rule.holds(static_cast<double>(value))) continue;
        faults.add(mark, fmt::format("{}: must be {}, got {}", path, bounds(), value));
        return false;
      }
    } else if constexpr (std::is_same_v<X, std::string>) {
      if (choices_.empty() || std::find(choices_.begin(), choices_.end(), value) != choices_.end())
        return true;
      faults.add(mark, fmt::format("{}: must be {}, got '{}'{}", path, bounds(), shortened(value),
                                   base::did_you_mean(value, choices_)));
      return false;
    }
    return true;
  }
  template <class X>
  bool check(const std::optional<X>& value, const Mark& mark, const std::string& path,
             Faults& faults) const {
    return !value || check(*value, mark, path, faults);
  }
  template <class X>
  bool check(const OrAuto<X>& value, const Mark& mark, const std::string& path,
             Faults& faults) const {
    return check(value.value, mark, path, faults);
  }
  template <class X>
  bool check(const std::vector<X>& values, const Mark& mark, const std::string& path,
             Faults& faults) const {
    if (length_ && values.size() != *length_) {
      faults.add(mark,
                 fmt::format("{}: must have {} values, got {}", path, *length_, values.size()));
      return false;
    }
    for (const X& value : values) {
      if (!check(value, mark, path, faults)) return false;
    }
    return true;
  }

  std::vector<Rule> numbers_;
  std::optional<size_t> length_;
  std::vector<std::string> choices_;
  std::string unit_;
  bool required_ = false;
};

/// The description of an option struct T: its keys, their help and rules.
/// Built once per type; immutable and safe to share between threads afterwards.
template <class T>
class Schema {
 public:
  static const Schema& get() {
    static const Schema schema = [] {
      Schema made;
      T::describe(made);
      return made;
    }();
    return schema;
  }

  template <class M>
  Rules<M>& field(const std::string& name, M T::*member, const std::string& help) {
    auto rules = std::make_shared<Rules<M>>();
    Rules<M>& result = *rules;
    Field field;
    field.name = name;
    field.required = [rules] { return rules->required_; };
    field.read = [member, rules](const Value& value, T& out, const std::string& path,
                                 Faults& faults) {
      return Codec<M>::read(value, out.*member, path, faults) &&
             rules->check(out.*member, value.mark, path, faults);
    };
    field.write = [member](const T& in) { return Codec<M>::write(in.*member); };
    field.info = [member, rules, help](const T& defaults, const std::string& path,
                                       std::vector<FieldInfo>& out) {
      if constexpr (requires { Codec<M>::info(defaults.*member, path, help, out); }) {
        Codec<M>::info(defaults.*member, path, help, out);
      } else {
        FieldInfo info;
        info.path = path;
        info.type = Codec<M>::type_name();
        info.help = help;
        info.unit = rules->unit_;
        info.range = rules->range();
        info.required = rules->required_;
        const Value value = Codec<M>::write(defaults.*member);
        if (value.kind == Value::Kind::kNull) info.default_value = "null";
        if (value.kind == Value::Kind::kScalar) info.default_value = value.scalar;
        if (value.kind == Value::Kind::kList) {
          std::vector<std::string> items;
          for (const Value& item : value.list) items.push_back(item.scalar);
          info.default_value = fmt::format("[{}]", base::join(items, ", "));
        }
        out.push_back(std::move(info));
      }
    };
    fields_.push_back(std::move(field));
    return result;
  }

  /// A rule over several fields: returns what is wrong, or nothing.
  void check(std::function<std::optional<std::string>(const T&)> rule) {
    checks_.push_back(std::move(rule));
  }

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const Field& field : fields_) all.push_back(field.name);
    return all;
  }

  /// Reads a section into `out`; keys not written keep their defaults. `skip` names a key that
  /// belongs to the caller ("type" of a Component), `hint` may know more about an unknown key.
  /// Adds every fault it meets.
  bool read(const Value& value, T& out, const std::string& path, Faults& faults,
            const std::string& skip = "", const Hint& hint = {}) const {
    if (value.kind != Value::Kind::kMap && value.kind != Value::Kind::kNull) {
      if (path.empty()) {
        faults.add(value.mark,
                   fmt::format("expected lines of the form KEY: VALUE, got {}", value.str()));
      } else {
        detail::wrong_type(value, path, "a section", faults);
      }
      return false;
    }
    bool good = true;
    for (const Value::Member& member : value.members) {
      if (!skip.empty() && member.key == skip) continue;
      const auto field = std::find_if(fields_.begin(), fields_.end(),
                                      [&](const Field& f) { return f.name == member.key; });
      if (field == fields_.end()) {
        std::string tail = hint ? hint(member.key) : "";
        if (tail.empty()) tail = base::did_you_mean(member.key, names());
        faults.add(member.mark, fmt::format("unknown key '{}'{}",
                                            shortened(detail::at(path, member.key)), tail));
        good = false;
      } else {
        good &= field->read(member.value, out, detail::at(path, member.key), faults);
      }
    }
    for (const Field& field : fields_) {
      if (field.required() && value.find(field.name) == nullptr) {
        faults.add(value.mark,
                   fmt::format("the key '{}' is missing", detail::at(path, field.name)));
        good = false;
      }
    }
    if (!good) return false;
    for (const auto& rule : checks_) {
      if (const auto problem = rule(out)) {
        faults.add(value.mark, path.empty() ? *problem : path + ": " + *problem);
        good = false;
      }
    }
    return good;
  }

  Value write(const T& in) const {
    Value value = Value::of_map();
    for (const Field& field : fields_) value.set(field.name, field.write(in));
    return value;
  }

  void info(const std::string& path, std::vector<FieldInfo>& out) const {
    const T defaults{};
    for (const Field& field : fields_) field.info(defaults, detail::at(path, field.name), out);
  }

 private:
  struct Field {
    std::string name;
    std::function<bool()> required;
    std::function<bool(const Value&, T&, const std::string&, Faults&)> read;
    std::function<Value(const T&)> write;
    std::function<void(const T&, const std::string&, std::vector<FieldInfo>&)> info;
  };
  std::vector<Field> fields_;
  std::vector<std::function<std::optional<std::string>(const T&)>> checks_;
};

template <Described T>
struct Codec<T> {
  static std::string type_name() { return "section"; }
  static bool read(const Value& value, T& out, const std::string& path, Faults& faults) {
    return Schema<T>::get().read(value, out, path, faults);
  }
  static Value write(const T& in) { return Schema<T>::get().write(in); }
  static void info(const T&, const std::string& path, const std::string&,
                   std::vector<FieldInfo>& out) {
    Schema<T>::get().info(path, out);
  }
};

/// Alternatives that a configuration chooses from by name, each with options of its own:
/// `optimizer: {type: sgd, lr: 0.1}`. Product is what an alternative makes, Args what it needs
/// besides its options. Registration happens at start-up, before threads.
template <class Product_, class... Args>
class Registry {
 public:
  using Product = Product_;

  /// One alternative with its options read.
  class Choice {
   public:
    virtual ~Choice() = default;
    virtual Product make(Args... args) const = 0;
    virtual Value write() const = 0;
  };

  struct Entry {
    std::string help;
    std::function<std::shared_ptr<const Choice>(const Value&, const std::string&, Faults&,
                                                const Hint&)>
        read;
    std::function<void(const std::string&, std::vector<FieldInfo>&)> info;
    std::function<std::vector<std::string>()> keys;
  };

  template <Described Options, class Make>
  void add(const std::string& type, const std::string& help, Make make) {
    Entry entry;
    entry.help = help;
    entry.read = [type, make](const Value& value, const std::string& path, Faults& faults,
                              const Hint& hint) -> std::shared_ptr<const Choice> {
      Options options{};
      if (!Schema<Options>::get().read(value, options, path, faults, "type", hint)) return nullptr;
      return std::make_shared<Made<Options, Make>>(type, std::move(options), make);
    };
    entry.info = [type](const std::string& path, std::vector<FieldInfo>& out) {
      const size_t first = out.size();
      Schema<Options>::get().info(path, out);
      for (size_t i = first; i < out.size(); ++i) out[i].only_for = "type: " + type;
    };
    entry.keys = [] { return Schema<Options>::get().names(); };
    entries_[type] = std::move(entry);
  }

  const std::map<std::string, Entry>& entries() const { return entries_; }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, entry] : entries_) all.push_back(name);
    return all;
  }

  /// A hint (see Hint) about a key that is known, but to another alternative.
  std::string belongs_to(const std::string& key) const {
    std::vector<std::string> types;
    for (const auto& [type, entry] : entries_) {
      const auto keys = entry.keys();
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) types.push_back(type);
    }
    return types.empty() ? "" : "; it belongs to type " + base::join(types, ", ");
  }

 private:
  template <class Options, class Make>
  class Made : public Choice {
   public:
    Made(std::string type, Options options, Make make)
        : type_(std::move(type)), options_(std::move(options)), make_(std::move(make)) {}
    Product make(Args... args) const override {
      return make_(options_, std::forward<Args>(args)...);
    }
    Value write() const override {
      Value value = Value::of_map();
      value.set("type", Value::of_scalar(type_));
      for (auto& member : Schema<Options>::get().write(options_).members) {
        value.set(member.key, std::move(member.value));
      }
      return value;
    }

   private:
    std::string type_;
    Options options_;
    Make make_;
  };

  std::map<std::string, Entry> entries_;
};

/// A field that chooses from a registry. `Kind` has
///   using Registry = config::Registry<...>;   static Registry& registry();
/// Written as `{type: name, ...its options}` or just `name`.
template <class Kind>
class Component {
 public:
  using Choice = typename Kind::Registry::Choice;

  Component() = default;
  /// The alternative `type` with its default options.
  explicit Component(const std::string& type) : type_(type) {
    Value value = Value::of_map();
    Faults faults;
    choice_ = Kind::registry().entries().at(type).read(value, "", faults, {});
    faults.throw_if_any();
  }
  Component(std::string type, std::shared_ptr<const Choice> choice)
      : type_(std::move(type)), choice_(std::move(choice)) {}

  const std::string& type() const { return type_; }
  explicit operator bool() const { return choice_ != nullptr; }

  template <class... Args>
  auto make(Args&&... args) const {
    if (!choice_) throw base::InternalError("a component was used that no configuration has set");
    return choice_->make(std::forward<Args>(args)...);
  }
  Value write() const { return choice_ ? choice_->write() : Value(); }

 private:
  std::string type_;
  std::shared_ptr<const Choice> choice_;
};

template <class Kind>
struct Codec<Component<Kind>> {
  static std::string type_name() { return "section with a type"; }
  static bool read(const Value& value, Component<Kind>& out, const std::string& path,
                   Faults& faults) {
    const auto& entries = Kind::registry().entries();
    const Value* type = value.kind == Value::Kind::kScalar ? &value : value.find("type");
    // A default names its type, so that its options can be set without repeating it.
    const Value default_type = Value::of_scalar(out.type());
    if (type == nullptr && out) type = &default_type;
    if (value.kind == Value::Kind::kList || type == nullptr || type->kind != Value::Kind::kScalar) {
      faults.add(value.mark, fmt::format("{}: the key 'type' is missing; it is one of {}", path,
                                         base::join(Kind::registry().names(), ", ")));
      return false;
    }
    const auto entry = entries.find(type->scalar);
    if (entry == entries.end()) {
      const auto names = Kind::registry().names();
      faults.add(type->mark,
                 fmt::format("{}: unknown type {}{} (known: {})", path, type->str(),
                             base::did_you_mean(type->scalar, names), base::join(names, ", ")));
      return false;
    }
    Value nothing;
    nothing.mark = value.mark;
    const Hint hint = [&](const std::string& key) {
      const std::string owner = Kind::registry().belongs_to(key);
      return owner.empty() ? owner : fmt::format("{}, the type here is {}", owner, entry->first);
    };
    auto choice = entry->second.read(type == &value ? nothing : value, path, faults, hint);
    if (!choice) return false;
    out = Component<Kind>(entry->first, std::move(choice));
    return true;
  }
  static Value write(const Component<Kind>& in) { return in.write(); }
  static void info(const Component<Kind>& defaults, const std::string& path,
                   const std::string& help, std::vector<FieldInfo>& out) {
    FieldInfo type;
    type.path = detail::at(path, "type");
    type.type = "text";
    type.range = "one of " + base::join(Kind::registry().names(), ", ");
    type.default_value = defaults.type();
    type.required = !defaults;
    type.help = help;
    for (const auto& [name, entry] : Kind::registry().entries()) {
      type.alternatives.emplace_back(name, entry.help);
    }
    out.push_back(std::move(type));
    for (const auto& [name, entry] : Kind::registry().entries()) entry.info(path, out);
  }
};

}  // namespace syncbn::config
