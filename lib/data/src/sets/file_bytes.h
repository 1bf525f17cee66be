#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// Opens a regular file for reading. @throws base::UserError naming it.
base::UniqueFd open_file(const std::filesystem::path& path);

int64_t size_of_file(const base::UniqueFd& file, const std::filesystem::path& path);

/// Fills `bytes`, whose memory is used again, with `size` bytes of the file from `offset` on.
/// @throws base::UserError when the file ends before, UnavailableError when the disk fails.
void read_at(const base::UniqueFd& file, const std::filesystem::path& path, int64_t offset,
             int64_t size, std::vector<uint8_t>& bytes);

/// Asks the system to read a part of a file into its cache; does not wait for it.
void read_ahead(const base::UniqueFd& file, int64_t offset, int64_t size);

/// The whole file.
void read_whole_file(const std::filesystem::path& path, std::vector<uint8_t>& bytes);

/// This thread's buffer for the bytes of one file, kept so that memory is not asked for each time.
std::vector<uint8_t>& thread_buffer();

}  // namespace syncbn::data::detail
