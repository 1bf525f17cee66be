#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

/// Converts to any type, in unevaluated expressions that count the members of a struct.
struct AnyMember {
  template <class T>
  constexpr operator T&() const&& noexcept;
};
struct AnyMovedMember {
  template <class T>
  constexpr operator T&&() const&& noexcept;
};

template <class T, class Member, size_t... index>
constexpr bool is_made_of(std::index_sequence<index...> /*indices*/) {
  return requires {
    T{(static_cast<void>(index), Member{})...};
  };
}

inline constexpr size_t kMaxMembers = 12;

/// The number of members of a plain struct: the length of the longest list that initialises it.
template <class T, size_t most = kMaxMembers + 1>
constexpr size_t count_members() {
  if constexpr (most == 0) {
    return 0;
  } else if constexpr (is_made_of<T, AnyMember>(std::make_index_sequence<most>()) ||
                       is_made_of<T, AnyMovedMember>(std::make_index_sequence<most>())) {
    return most;
  } else {
    return count_members<T, most - 1>();
  }
}

/// References to the members of a plain struct.
template <class T>
auto tie_members(T& value) {
  constexpr size_t count = count_members<std::remove_const_t<T>>();
  static_assert(count <= kMaxMembers,
                "a struct of tensors may have 12 members at most; return a tuple, or give it a "
                "member function template for_each_tensor(visit)");
  if constexpr (count == 0) return std::tie();
#define SYNCBN_TIE(number, ...)      \
  if constexpr (count == (number)) { \
    auto& [__VA_ARGS__] = value;     \
    return std::tie(__VA_ARGS__);    \
  }
  SYNCBN_TIE(1, a)
  SYNCBN_TIE(2, a, b)
  SYNCBN_TIE(3, a, b, c)
  SYNCBN_TIE(4, a, b, c, d)
  SYNCBN_TIE(5, a, b, c, d, e)
  SYNCBN_TIE(6, a, b, c, d, e, f)
  SYNCBN_TIE(7, a, b, c, d, e, f, g)
  SYNCBN_TIE(8, a, b, c, d, e, f, g, h)
  SYNCBN_TIE(9, a, b, c, d, e, f, g, h, i)
  SYNCBN_TIE(10, a, b, c, d, e, f, g, h, i, j)
  SYNCBN_TIE(11, a, b, c, d, e, f, g, h, i, j, k)
  SYNCBN_TIE(12, a, b, c, d, e, f, g, h, i, j, k, l)
#undef SYNCBN_TIE
}

template <class T>
concept Text = std::is_convertible_v<const T&, std::string_view>;
template <class T>
concept Optional = requires(T value) {
  value.has_value(), *value;
};
/// Excludes types whose elements have the same type, such as std::filesystem::path.
template <class T>
concept Container = !Text<T> && requires(T value) {
  value.begin(), value.end();
  requires !std::is_same_v<std::remove_cvref_t<decltype(*value.begin())>, T>;
};
/// An item of torch::OrderedDict.
template <class T>
concept KeyAndValue = requires(T item) {
  item.key(), item.value();
};
template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept Variant = requires {
  std::variant_size<T>::value;
};
template <class T>
concept PlainStruct = std::is_aggregate_v<T> && !std::is_array_v<T>;

/// Calls visit(tensor) for each defined tensor in a value, also inside optionals, variants,
/// containers, pairs, tuples and plain structs (aggregates without base classes or array members).
/// Other types can have a member function template for_each_tensor(visit); otherwise they count as
/// holding no tensors. Also calls visit.key(key), if there is such a function, for each key of a
/// map.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  using Value = std::remove_const_t<T>;
  const auto visit_all = [&visit](auto&... items) { (for_each_tensor(items, visit), ...); };
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (requires { value.for_each_tensor(visit); }) {
    value.for_each_tensor(visit);
  } else if constexpr (Text<Value>) {
    // Such as the key of a map.
  } else if constexpr (Optional<Value>) {
    if (value.has_value()) for_each_tensor(*value, visit);
  } else if constexpr (Container<Value>) {
    for (auto&& item : value) {
      if constexpr (requires {
                      typename Value::mapped_type;
                      visit.key(item.first);
                    }) {
        visit.key(item.first);
      }
      for_each_tensor(item, visit);
    }
  } else if constexpr (KeyAndValue<Value>) {
    if constexpr (requires { visit.key(value.key()); }) visit.key(value.key());
    for_each_tensor(value.value(), visit);
  } else if constexpr (TupleLike<Value>) {
    std::apply(visit_all, value);
  } else if constexpr (Variant<Value>) {
    std::visit(visit_all, value);
  } else if constexpr (PlainStruct<Value>) {
    std::apply(visit_all, tie_members(value));
  }
}

/// Returns a copy of `argument` with its tensors on `device`, or `argument` if it has no tensors.
template <class T>
decltype(auto) to_device(T&& argument, const std::optional<at::Device>& device) {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<Value, at::Tensor> || Optional<Value> || Container<Value> ||
                TupleLike<Value> || Variant<Value> || PlainStruct<Value>) {
    Value moved(std::forward<T>(argument));
    if (device) {
      for_each_tensor(moved, [&device](at::Tensor& tensor) {
        if (tensor.device() != *device) tensor = tensor.to(*device, /*non_blocking=*/true);
      });
    }
    return moved;
  } else {
    return std::forward<T>(argument);
  }
}

}  // namespace syncbn::dist::detail
