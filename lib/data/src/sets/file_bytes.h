#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// Opens a regular file for reading. @throws base::UserError naming it.
base::UniqueFd open_file(const std::filesystem::path& path);

int64_t size_of_file(const base::UniqueFd& file, const std::filesystem::path& path);

/// Reads `size` bytes at `offset` into `bytes`.
/// @throws base::UserError if the file ends too early, UnavailableError if the disk fails.
void read_at(const base::UniqueFd& file, const std::filesystem::path& path, int64_t offset,
             int64_t size, std::vector<uint8_t>& bytes);

/// Asks the system to read a part of a file into its cache, without waiting for it.
void read_ahead(const base::UniqueFd& file, int64_t offset, int64_t size);

/// A buffer of this thread, so that memory is not allocated for each sample.
std::vector<uint8_t>& thread_buffer();

/// The whole file, in thread_buffer().
std::span<const uint8_t> read_whole_file(const std::filesystem::path& path);

/// The uncompressed content of a gzip file; any other file as it is.
/// @throws base::UserError naming the file if it is missing, unreadable, damaged, truncated, or
///   longer than `max_bytes` after decompression.
std::string read_gzip_file(const std::filesystem::path& path, size_t max_bytes);

}  // namespace syncbn::data::detail
