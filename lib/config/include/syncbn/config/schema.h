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
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/base/text.h>
#include <syncbn/config/codec.h>
// For those who describe options: some are chosen by a type.
#include <syncbn/config/component.h>
#include <syncbn/config/field_info.h>
#include <syncbn/config/rules.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

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

}  // namespace syncbn::config
