#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// A regular file in a tar archive: where its bytes are.
struct TarMember {
  std::string name;
  int64_t offset = 0;
  int64_t size = 0;
};

/// Calls `visit` for each regular file of an archive (ustar, GNU and pax names), in order. Reads
/// headers only.
/// @throws base::UserError naming archive and member for a damaged or cut archive, and for what
///   nobody means well with: links, devices, absolute names, and names with `..`.
void for_each_tar_member(const base::UniqueFd& file, const std::filesystem::path& path,
                         const std::function<void(const TarMember&)>& visit);

}  // namespace syncbn::data::detail
