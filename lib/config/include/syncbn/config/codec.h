#pragma once

// Reads and writes numbers, text and lists. schema.h reads and writes sections, component.h
// sections with a type.

#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncbn/config/value.h>

namespace syncbn::config {

/// A value, or `auto`: the program chooses.
template <class T>
struct OrAuto {
  std::optional<T> value;  ///< empty: auto
};

template <class T>
class Schema;

/// The named parts of a JSON Schema that other parts refer to ($defs).
using Definitions = std::map<std::string, Value>;

/// Reads and writes a T. This template is for text, bool, integers of at least 16 bits, float and
/// double. Specialisations: std::optional, OrAuto, std::vector, described structs, Component.
template <class T>
struct Codec {
  static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::string>,
                "an option cannot have this type");
  static std::string type_name();
  static bool read(const Value& value, T& out, const std::string& path, Faults& faults);
  static Value write(const T& in);
  /// The JSON Schema of this type, without the rules of a field.
  static Value json_schema(Definitions& definitions);
};

template <class T>
concept Described = requires(Schema<T>& schema) {
  T::describe(schema);
};

namespace detail {

/// "section.key", or "key" at the top level.
std::string at(const std::string& path, const std::string& key);
/// "path[index]"
std::string at(const std::string& path, size_t index);

/// {KEY: VALUE}
Value map_of(const std::string& key, Value value);
Value list_of(std::vector<Value> items);
/// A JSON Schema of what `schema` describes or a reference such as `${key}`.
Value or_reference(Value schema);

void wrong_type(const Value& value, const std::string& path, const std::string& wanted,
                Faults& faults);
void not_a_list(const Value& value, const std::string& path, Faults& faults);

}  // namespace detail

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
  static Value json_schema(Definitions& definitions) {
    Value null = detail::map_of("type", Value::of_text("null"));
    return detail::map_of("anyOf",
                          detail::list_of({Codec<T>::json_schema(definitions), std::move(null)}));
  }
};

template <class T>
struct Codec<OrAuto<T>> {
  static std::string type_name() { return Codec<T>::type_name() + " or auto"; }
  static bool read(const Value& value, OrAuto<T>& out, const std::string& path, Faults& faults) {
    if (value.scalar == "auto") return out.value.reset(), true;
    T inner{};
    Faults of_value;
    if (!Codec<T>::read(value, inner, path, of_value)) {
      detail::wrong_type(value, path, "one " + type_name(), faults);
      return false;
    }
    out.value = std::move(inner);
    return true;
  }
  static Value write(const OrAuto<T>& in) {
    return in.value ? Codec<T>::write(*in.value) : Value::of_scalar("auto");
  }
  static Value json_schema(Definitions& definitions) {
    Value automatic = detail::map_of("const", Value::of_text("auto"));
    return detail::map_of(
        "anyOf", detail::list_of({Codec<T>::json_schema(definitions), std::move(automatic)}));
  }
};

template <class T>
struct Codec<std::vector<T>> {
  static std::string type_name() { return "list of " + Codec<T>::type_name(); }
  static bool read(const Value& value, std::vector<T>& out, const std::string& path,
                   Faults& faults) {
    if (value.kind != Value::Kind::kList) {
      detail::not_a_list(value, path, faults);
      return false;
    }
    std::vector<T> items;
    bool good = true;
    for (const Value& one : value.list) {
      T item{};
      good &=
          !one.is_unresolved && Codec<T>::read(one, item, detail::at(path, items.size()), faults);
      items.push_back(std::move(item));
    }
    if (good) out = std::move(items);
    return good;
  }
  static Value write(const std::vector<T>& in) {
    std::vector<Value> items;
    for (const T& item : in) items.push_back(Codec<T>::write(item));
    return detail::list_of(std::move(items));
  }
  static Value json_schema(Definitions& definitions) {
    // A file that is based on another may change parts of single items: {0: …}.
    Value schema = detail::map_of(
        "type", detail::list_of({Value::of_text("array"), Value::of_text("object")}));
    schema.set("items", detail::or_reference(Codec<T>::json_schema(definitions)));
    schema.set("patternProperties", detail::map_of("^[0-9]+$", Value::of_map()));
    schema.set("additionalProperties", Value::of_scalar("false"));
    return schema;
  }
};

}  // namespace syncbn::config
