#pragma once

// How single values are read and written: numbers, text, lists. Sections are in schema.h, sections
// with a type in component.h.

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <functional>
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

}  // namespace syncbn::config
