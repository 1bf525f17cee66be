#pragma once

// Describe an option struct once. YAML parsing, command line, --help, --print-config, the
// reference in docs/ and error messages use that description. Does not need yaml-cpp.
//
//   struct SgdOptions {
//     double lr = 0.1;
//     bool nesterov = false;
//     static void describe(config::Schema<SgdOptions>& schema) {
//       schema.field("lr", &SgdOptions::lr, "learning rate").above(0);
//       schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
//     }
//   };

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>  // UserError, for code that describes options
#include <syncbn/config/codec.h>
#include <syncbn/config/component.h>
#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// The rules of one field, set by a chain of calls after Schema::field. In a list, bounds apply to
/// each number. Null and `auto` pass every rule.
class Rules {
 public:
  Rules& at_least(double bound) { return info_.min = bound, *this; }
  Rules& at_most(double bound) { return info_.max = bound, *this; }
  Rules& between(double least, double most) { return at_least(least).at_most(most); }
  Rules& above(double bound) { return above_ = bound, *this; }
  Rules& below(double bound) { return below_ = bound, *this; }
  /// From 0 to below 1, as a probability of dropping or a momentum.
  Rules& fraction() { return at_least(0).below(1); }
  Rules& positive_up_to(double most) { return above(0).at_most(most); }
  /// The number of values in a list.
  Rules& length(size_t count) { return length_ = count, *this; }
  Rules& one_of(std::vector<std::string> all) { return info_.choices = std::move(all), *this; }
  Rules& unit(std::string text) { return info_.unit = std::move(text), *this; }
  Rules& required() { return info_.required = true, *this; }

  // How help and a command line spell the field; FieldInfo explains them.
  Rules& value_name(std::string name) { return info_.value_name = std::move(name), *this; }
  Rules& letter(std::string dashed) { return info_.letter = std::move(dashed), *this; }
  Rules& other_names(std::vector<std::string> v) { return info_.other_names = std::move(v), *this; }
  Rules& environment(std::vector<std::string> v) { return info_.environment = std::move(v), *this; }
  /// Adds to the tags of the field's group.
  Rules& tags(unsigned more) { return info_.tags |= more, *this; }
  /// Shown in place of the default's value.
  Rules& shown_default(std::string text) { return shown_default_ = std::move(text), *this; }

 private:
  friend class SchemaBase;

  std::string bounds() const;
  /// Adds the rules to a field's JSON Schema.
  void restrict(Value& schema) const;
  void restrict_one(Value& schema) const;
  bool holds(double number) const;
  /// Whether a field's value, as its Codec writes it, satisfies the rules.
  bool check(const Value& value, const Mark& mark, const std::string& path, Faults& faults) const;

  FieldInfo info_;  ///< without path, type and range, which follow from the rest
  std::optional<double> above_;
  std::optional<double> below_;
  std::optional<size_t> length_;
  std::optional<std::string> shown_default_;
};

/// Text to append to the message about an unknown key, or "".
using Hint = std::function<std::string(const std::string& key)>;

namespace detail {

/// The functions of a Codec<M>, without M.
struct FieldType {
  std::string (*name)();
  bool (*read)(const Value& value, void* out, const std::string& path, Faults& faults);
  Value (*write)(const void* in);
  Value (*json_schema)(Definitions& definitions);
  /// Null unless M is a section, which has its own fields.
  void (*info)(const void* defaults, const std::string& path, const std::string& help,
               std::vector<FieldInfo>& out);
};

template <class M>
constexpr FieldType field_type() {
  FieldType type{};
  type.name = Codec<M>::type_name;
  type.read = [](const Value& value, void* out, const std::string& path, Faults& faults) {
    return Codec<M>::read(value, *static_cast<M*>(out), path, faults);
  };
  type.json_schema = Codec<M>::json_schema;
  type.write = [](const void* in) { return Codec<M>::write(*static_cast<const M*>(in)); };
  if constexpr (requires { &Codec<M>::info; }) {
    type.info = [](const void* defaults, const std::string& path, const std::string& help,
                   std::vector<FieldInfo>& out) {
      Codec<M>::info(*static_cast<const M*>(defaults), path, help, out);
    };
  }
  return type;
}

}  // namespace detail

/// The part of Schema without templates; `void*` points to the struct.
class SchemaBase {
 public:
  SchemaBase(const SchemaBase&) = delete;
  SchemaBase& operator=(const SchemaBase&) = delete;

  /// Heading in help, and tags, for the fields that are added after it.
  void group(std::string name, unsigned tags = 0) { group_ = std::move(name), tags_ = tags; }

  std::vector<std::string> names() const;
  /// @param hint for a section with the key `type`, which the caller reads.
  bool read(const Value& value, void* out, const std::string& path, Faults& faults,
            const Hint& hint = {}) const;
  Value write(const void* in) const;
  void info(const std::string& path, std::vector<FieldInfo>& out) const;
  /// A section in JSON Schema; see json_schema.h.
  Value json_schema(Definitions& definitions) const;

 protected:
  using Check = std::function<std::optional<std::string>(const void*)>;

  explicit SchemaBase(std::shared_ptr<const void> defaults) : defaults_(std::move(defaults)) {}
  ~SchemaBase() = default;
  const void* defaults() const { return defaults_.get(); }
  /// @param member of defaults().
  Rules& add_field(const std::string& name, const std::string& help, detail::FieldType type,
                   const void* member);
  void add_check(Check check) { checks_.push_back(std::move(check)); }

 private:
  struct Field {
    std::string name;
    detail::FieldType type;
    ptrdiff_t offset;  ///< of the member in the struct
    Rules rules;
  };

  std::shared_ptr<const void> defaults_;
  std::string group_;
  unsigned tags_ = 0;         ///< of the group
  std::deque<Field> fields_;  ///< a deque, because describe() holds references to rules
  std::vector<Check> checks_;
};

/// The description of an option struct T: its keys, their help and rules.
/// Built once per type; immutable and safe to share between threads afterwards.
template <class T>
class Schema : public SchemaBase {
 public:
  static const Schema& get() {
    static const Schema schema;
    return schema;
  }

  /// @param member of T or of a base class of it.
  template <class M, class Owner>
  Rules& field(const std::string& name, M Owner::*member, const std::string& help) {
    return add_field(name, help, detail::field_type<M>(),
                     &(static_cast<const T*>(defaults())->*member));
  }

  /// Adds a rule about several fields.
  /// @param is_wrong takes a const T&; if true, `message` is a fault.
  template <class Rule>
  void refuse(const std::string& message, Rule is_wrong) {
    check([message, is_wrong](const T& in) {
      return is_wrong(in) ? std::optional(message) : std::nullopt;
    });
  }

  /// Adds a rule about several fields.
  /// @param rule takes a const T& and returns what is wrong, as an optional string.
  template <class Rule>
  void check(Rule rule) {
    add_check([rule](const void* in) { return rule(*static_cast<const T*>(in)); });
  }

  /// Reads a section into `out`. Fields whose key is absent keep their values. Adds all faults;
  /// false if there is one.
  bool read(const Value& value, T& out, const std::string& path, Faults& faults) const {
    return SchemaBase::read(value, &out, path, faults);
  }

  Value write(const T& in) const { return SchemaBase::write(&in); }

 private:
  Schema() : SchemaBase(std::make_shared<const T>()) { T::describe(*this); }
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
  static Value json_schema(Definitions& definitions) {
    return Schema<T>::get().json_schema(definitions);
  }
};

}  // namespace syncbn::config
