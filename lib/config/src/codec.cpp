#include <syncbn/config/codec.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <cmath>

namespace syncbn::config {
namespace detail {

std::string at(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

std::string at(const std::string& path, size_t index) {
  return fmt::format("{}[{}]", path, index);
}

void wrong_type(const Value& value, const std::string& path, const std::string& wanted,
                Faults& faults) {
  faults.add(value.mark, fmt::format("{}: expected {}, got {}", path, wanted, value.str()));
}

bool is_auto(const Value& value) {
  return value.kind == Value::Kind::kScalar && value.scalar == "auto";
}

}  // namespace detail

namespace {

template <class T>
std::optional<T> parse(std::string_view text) {
  if constexpr (std::is_same_v<T, bool>) {
    // The spellings of YAML 1.2, which has Python's True and False but neither yes nor no.
    for (const char* word : {"true", "True", "TRUE"}) {
      if (text == word) return true;
    }
    for (const char* word : {"false", "False", "FALSE"}) {
      if (text == word) return false;
    }
    return std::nullopt;
  } else {
    if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
    auto number = base::parse_number<T>(text);
    if (number && !std::isfinite(static_cast<double>(*number))) number.reset();
    return number;
  }
}

template <class T>
constexpr const char* wanted() {
  if (std::is_same_v<T, bool>) return "true or false";
  return std::is_integral_v<T> ? "an integer" : "a finite number";
}

}  // namespace

template <class T>
std::string Codec<T>::type_name() {
  if (std::is_same_v<T, bool>) return "true|false";
  return std::is_integral_v<T> ? "integer" : "number";
}

template <class T>
bool Codec<T>::read(const Value& value, T& out, const std::string& path, Faults& faults) {
  const std::optional<T> parsed =
      value.kind == Value::Kind::kScalar ? parse<T>(value.scalar) : std::nullopt;
  if (parsed && !value.quoted) return out = *parsed, true;
  if (parsed) {
    faults.add(value.mark, fmt::format("{}: expected {}, got the text {}; remove its quotes", path,
                                       wanted<T>(), value.str()));
  } else {
    detail::wrong_type(value, path, wanted<T>(), faults);
  }
  return false;
}

template <class T>
Value Codec<T>::write(T in) {
  return Value::of_scalar(fmt::format("{}", in));
}

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

std::string Codec<std::string>::type_name() {
  return "text";
}
bool Codec<std::string>::read(const Value& value, std::string& out, const std::string& path,
                              Faults& faults) {
  if (value.kind == Value::Kind::kScalar) return out = value.scalar, true;
  detail::wrong_type(value, path, "text", faults);
  return false;
}
Value Codec<std::string>::write(const std::string& in) {
  return Value::of_scalar(in, /*quoted=*/true);
}

}  // namespace syncbn::config
