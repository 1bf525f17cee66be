#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::data::detail {

/// Many names, one behind the other: eight bytes each besides the name, not an object.
class NameList {
 public:
  /// @throws base::UserError when all names together have more than 4 GB.
  void add(std::string_view name);

  std::string_view operator[](int64_t index) const {
    return text_of(entries_[static_cast<size_t>(index)]);
  }
  int64_t size() const { return std::ssize(entries_); }

  /// By bytes.
  void sort() {
    std::ranges::sort(entries_, {}, [this](const Entry& entry) { return text_of(entry); });
  }

 private:
  struct Entry {
    uint32_t begin;
    uint32_t size;
  };

  std::string_view text_of(const Entry& entry) const {
    return std::string_view(bytes_).substr(entry.begin, entry.size);
  }

  std::string bytes_;
  std::vector<Entry> entries_;
};

}  // namespace syncbn::data::detail
