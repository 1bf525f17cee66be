#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace syncbn::data {

/// The whole of a gzip file, uncompressed; a file that is not gzip as it is.
/// @throws base::UserError naming the file and the reason: it is missing, unreadable, damaged, cut
///   short, or longer than `max_bytes` when uncompressed.
std::string read_gzip_file(const std::filesystem::path& path, size_t max_bytes);

}  // namespace syncbn::data
