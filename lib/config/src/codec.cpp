#include <syncbn/config/codec.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <cmath>
#include <limits>

namespace syncbn::config {
namespace detail {

std::string at(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

std::string at(const std::string& path, size_t index) {
  return at(path, std::to_string(index));  // as the command line spells it
}

Value map_of(const std::string& key, Value value) {
  Value map = Value::of_map();
  map.set(key, std::move(value));
  return map;
}

Value list_of(std::vector<Value> items) {
  Value list;
  list.kind = Value::Kind::kList;
  list.list = std::move(items);
  return list;
}

Value or_reference(Value schema) {
  Value reference = map_of("$ref", Value::of_text("#/$defs/reference"));
  return map_of("anyOf", list_of({std::move(schema), std::move(reference)}));
}

void wrong_type(const Value& value, const std::string& path, const std::string& wanted,
                Faults& faults) {
  faults.add(value.mark, fmt::format("{}: expected {}, got {}", path, wanted, value.str()));
}

void not_a_list(const Value& value, const std::string& path, Faults& faults) {
  const bool names_items = value.kind == Value::Kind::kMap && !value.members.empty() &&
                           base::parse_number<size_t>(value.members.front().key);
  if (!names_items) {
    // An empty value has an empty scalar.
    const bool is_map = value.kind == Value::Kind::kMap;
    return wrong_type(value, path, is_map ? "a list" : fmt::format("a list, as [{}]", value.scalar),
                      faults);
  }
  faults.add(value.mark, fmt::format("{}: no file sets this list, so there is no item {} to "
                                     "change; write the whole list",
                                     path, value.members.front().key));
}

}  // namespace detail

namespace {

template <class T>
std::optional<T> parse(std::string_view text) {
  if constexpr (std::is_same_v<T, std::string>) {
    return std::string(text);
  } else if constexpr (std::is_same_v<T, bool>) {
    // The spellings of YAML 1.2, without yes and no.
    if (text == "true" || text == "True" || text == "TRUE") return true;
    if (text == "false" || text == "False" || text == "FALSE") return false;
    return std::nullopt;
  } else {
    if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
    auto number = base::parse_number<T>(text);
    if (number && !std::isfinite(static_cast<double>(*number))) number.reset();
    return number;
  }
}

template <class T>
constexpr const char* one_of(const char* text, const char* boolean, const char* integer,
                             const char* number) {
  if (std::is_same_v<T, std::string>) return text;
  if (std::is_same_v<T, bool>) return boolean;
  return std::is_integral_v<T> ? integer : number;
}

}  // namespace

template <class T>
std::string Codec<T>::type_name() {
  return one_of<T>("text", "true|false", "integer", "number");
}

template <class T>
bool Codec<T>::read(const Value& value, T& out, const std::string& path, Faults& faults) {
  std::string wanted = one_of<T>("text", "true or false", "an integer", "a finite number");
  std::optional<T> parsed;
  if (value.kind == Value::Kind::kScalar) parsed = parse<T>(value.scalar);
  if (!parsed) {
    using Limits = std::numeric_limits<T>;
    const bool is_whole = value.scalar.find_first_not_of("+-0123456789") == value.scalar.npos;
    if (std::is_integral_v<T> && !std::is_same_v<T, bool> && is_whole &&
        base::parse_number<double>(value.scalar)) {
      wanted += fmt::format(" from {} to {}", Limits::min(), Limits::max());
    }
    detail::wrong_type(value, path, wanted, faults);
    return false;
  }
  if (value.quoted && !std::is_same_v<T, std::string>) {
    faults.add(value.mark, fmt::format("{}: expected {}, got the text {}; remove its quotes", path,
                                       wanted, value.str()));
    return false;
  }
  out = *parsed;
  return true;
}

template <class T>
Value Codec<T>::write(const T& in) {
  std::string text = fmt::format("{}", in);
  if constexpr (std::is_floating_point_v<T>) {
    // For readers of YAML 1.1, such as PyYAML, 1e-08 is text.
    const size_t exponent = text.find('e');
    if (exponent != text.npos && text.find('.') == text.npos) text.insert(exponent, ".0");
  }
  return Value::of_scalar(std::move(text), /*quoted=*/std::is_same_v<T, std::string>);
}

template <class T>
Value Codec<T>::json_schema(Definitions&) {
  const char* const name = one_of<T>("string", "boolean", "integer", "number");
  return detail::map_of("type", Value::of_text(name));
}

template struct Codec<std::string>;
template struct Codec<bool>;
template struct Codec<short>;
template struct Codec<unsigned short>;
template struct Codec<int>;
template struct Codec<unsigned>;
template struct Codec<long>;
template struct Codec<unsigned long>;
template struct Codec<long long>;
template struct Codec<unsigned long long>;
template struct Codec<float>;
template struct Codec<double>;

}  // namespace syncbn::config
