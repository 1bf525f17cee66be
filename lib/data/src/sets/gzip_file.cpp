#include "sets/gzip_file.h"

#include <fmt/format.h>

// gzopen, gzread: reading .gz files.
#include <zlib.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data {
namespace {

struct Closer {
  void operator()(gzFile_s* file) const { gzclose(file); }
};

[[noreturn]] void fail_to_read(const std::filesystem::path& path, const std::string& why) {
  throw base::UserError(fmt::format("cannot read the data file '{}': {}", path.string(), why));
}

/// Why the last read failed, or nothing: zlib reports a stream that ends too early only after its
/// last good byte was given.
std::string failure(gzFile_s* file) {
  int code = Z_OK;
  const char* message = gzerror(file, &code);
  switch (code) {
    case Z_OK:
    case Z_STREAM_END:
      return "";
    case Z_ERRNO:
      return std::strerror(errno);
    case Z_BUF_ERROR:
      return "the gzip stream ends too early; the file was cut short";
    default:
      return fmt::format("the gzip stream is damaged ({})", message);
  }
}

}  // namespace

std::string read_gzip_file(const std::filesystem::path& path, size_t max_bytes) {
  errno = 0;
  const std::unique_ptr<gzFile_s, Closer> file(gzopen(path.c_str(), "rb"));
  if (!file) fail_to_read(path, std::strerror(errno != 0 ? errno : ENOMEM));
  std::string bytes;
  std::array<char, 1 << 16> chunk;
  while (true) {
    const int got = gzread(file.get(), chunk.data(), chunk.size());
    if (got <= 0) break;
    bytes.append(chunk.data(), static_cast<size_t>(got));
    if (bytes.size() > max_bytes) {
      fail_to_read(path, fmt::format("it holds more than {}", base::format_bytes(max_bytes)));
    }
  }
  if (const std::string why = failure(file.get()); !why.empty()) fail_to_read(path, why);
  return bytes;
}

}  // namespace syncbn::data
