#pragma once

#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>

namespace syncbn::train {

/// The items of all ranks, in the order of the ranks, as raw bytes. Every rank calls it.
template <class Item>
std::vector<Item> gathered(std::span<const Item> own) {
  static_assert(std::is_trivially_copyable_v<Item>);
  const std::string bytes(reinterpret_cast<const char*>(own.data()), own.size_bytes());
  const std::string all = base::join(dist::all_gather_bytes(bytes), "");
  std::vector<Item> items(all.size() / sizeof(Item));
  std::memcpy(items.data(), all.data(), all.size());
  return items;
}

}  // namespace syncbn::train
