#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// The position of a regular file in a tar archive.
struct TarMember {
  std::string name;
  int64_t offset = 0;
  int64_t size = 0;
};

/// Calls `visit` for each regular file of an archive (ustar, GNU and pax names), or of several that
/// were concatenated, in order. Reads headers only. Returns whether the archive has its closing
/// blocks of zeros: some programs omit them, and a file that was cut short between two members
/// lacks them.
/// @throws base::UserError naming archive and member for an empty, damaged or truncated archive,
///   and for members that could reach outside of it: links, devices, absolute names, names with
///   `..`.
bool for_each_tar_member(const base::UniqueFd& file, const std::filesystem::path& path,
                         const std::function<void(const TarMember&)>& visit);

}  // namespace syncbn::data::detail
