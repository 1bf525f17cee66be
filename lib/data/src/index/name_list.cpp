#include "index/name_list.h"

#include <syncbn/base/error.h>

namespace syncbn::data::detail {

void NameList::add(std::string_view name) {
  const size_t begin = bytes_.size();
  if (begin + name.size() > UINT32_MAX) {
    throw base::UserError(
        "the names in a folder have more than 4 GB together; put the files into several folders");
  }
  bytes_ += name;
  entries_.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(name.size())});
}

}  // namespace syncbn::data::detail
