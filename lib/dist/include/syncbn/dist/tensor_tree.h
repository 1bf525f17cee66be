#pragma once

#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

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
concept ShowsTensors = requires(T value) {
  value.for_each_tensor([](const auto&) {});
};

/// Refuses structs: their tensors would be overlooked.
template <class T>
constexpr void require_no_hidden_tensors() {
  static_assert(!std::is_aggregate_v<T> || std::is_array_v<T> || std::is_empty_v<T>,
                "a struct that forward takes or returns needs a member function template "
                "for_each_tensor(visit), which calls visit(member) for each member with tensors; "
                "it is empty if there are none");
}

/// Calls visit(tensor) for each defined tensor in a value, also inside optionals, variants,
/// containers, pairs and tuples. Structs have a member function template for_each_tensor(visit),
/// which calls visit(member) for these; classes can have one, too, and otherwise count as holding
/// no tensors. Also calls visit.key(key), if there is such a function, for each key of a map.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  using Value = std::remove_const_t<T>;
  const auto visit_all = [&visit](auto&... items) { (for_each_tensor(items, visit), ...); };
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (ShowsTensors<T>) {
    value.for_each_tensor([&visit](auto& item) { for_each_tensor(item, visit); });
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
  } else {
    require_no_hidden_tensors<Value>();
  }
}

/// Returns a copy of `argument` with its tensors on `device`, or `argument` if it has no tensors.
template <class T>
decltype(auto) to_device(T&& argument, const std::optional<at::Device>& device) {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<Value, at::Tensor> || Optional<Value> || Container<Value> ||
                TupleLike<Value> || Variant<Value> || ShowsTensors<Value>) {
    Value moved(std::forward<T>(argument));
    if (device) {
      for_each_tensor(moved, [&device](at::Tensor& tensor) {
        if (tensor.device() != *device) tensor = tensor.to(*device, /*non_blocking=*/true);
      });
    }
    return moved;
  } else {
    require_no_hidden_tensors<Value>();
    return std::forward<T>(argument);
  }
}

}  // namespace syncbn::dist::detail
