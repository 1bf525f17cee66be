#pragma once

// An option struct is described once. YAML parsing, command line, --help, --print-config, the
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

#include <syncbn/base/error.h>  // for those who describe options
#include <syncbn/config/codec.h>
#include <syncbn/config/component.h>
#include <syncbn/config/field_info.h>
#include <syncbn/config/rules.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// Text to append to the message about an unknown key, or "".
using Hint = std::function<std::string(const std::string& key)>;

namespace detail {

/// The functions of a Codec<M>, without M.
struct FieldType {
  std::string (*name)();
  bool (*read)(const Value& value, void* out, const std::string& path, Faults& faults);
  Value (*write)(const void* in);
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

  /// Heading in help for the fields that are added after it.
  void group(std::string name) { group_ = std::move(name); }

  std::vector<std::string> names() const;
  /// @param hint for a section with a type, whose key `type` the caller reads.
  bool read(const Value& value, void* out, const std::string& path, Faults& faults,
            const Hint& hint = {}) const;
  Value write(const void* in) const;
  void info(const std::string& path, std::vector<FieldInfo>& out) const;

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
  std::deque<Field> fields_;  ///< a deque, since describe() holds references to rules
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

  /// Adds a rule over several fields. It returns what is wrong, as an optional string.
  template <class Rule>
  void check(Rule rule) {
    add_check([rule](const void* in) { return rule(*static_cast<const T*>(in)); });
  }

  /// Reads a section into `out`; fields whose keys are missing keep their values. Adds each fault.
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
};

}  // namespace syncbn::config
