#include "sets/file_bytes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/text.h>
#include <syncbn/data/data_files.h>

#include "image/reader.h"

namespace syncbn::data {

std::filesystem::path find_data_file(const std::string& name) {
  std::vector<std::string> folders;
  if (const auto folder = base::env("SYNCBN_DATA_DIR")) folders.push_back(*folder);
  const auto program = base::program_file();
  if (!program.empty())
    folders.push_back(program.parent_path().parent_path() / "share/syncbn/data");
  folders.emplace_back("./data");
  for (const std::filesystem::path folder : folders) {
    if (base::exists(folder / name)) return folder / name;
  }
  throw base::UserError(fmt::format(
      "the data file '{}' was not found (looked in {}); set SYNCBN_DATA_DIR to the folder that "
      "holds it, or give its path in the configuration",
      name, base::join(folders, ", ")));
}

namespace detail {
namespace {

/// The error of the last read, or "". zlib reports a truncated stream only after it has returned
/// all bytes before the end.
std::string failure(gzFile_s* file) {
  int code = Z_OK;
  const char* message = gzerror(file, &code);
  if (code == Z_OK || code == Z_STREAM_END) return "";
  if (code == Z_ERRNO) return std::strerror(errno);
  if (code == Z_BUF_ERROR) return "the gzip stream ends too early; the file was cut short";
  return fmt::format("the gzip stream is damaged ({})", message);
}

}  // namespace

void refuse_file(const std::filesystem::path& path, const std::string& why) {
  throw base::UserError(fmt::format("cannot read the data file '{}': {}", path.string(), why));
}

void refuse_missing(const std::string& what, const std::vector<std::string>& missing,
                    const std::string& all, const std::string& advice) {
  constexpr size_t kShown = 5;
  if (missing.empty()) return;
  throw base::UserError(fmt::format("{} for {} of {}: {}; {}", what, missing.size(), all,
                                    base::join_some(missing, ", ", kShown), advice));
}

int64_t size_of_file(const base::UniqueFd& file, const std::filesystem::path& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) base::throw_errno("cannot read " + path.string());
  return status.st_size;
}

void read_at(const base::UniqueFd& file, const std::filesystem::path& path, int64_t offset,
             int64_t size, std::vector<uint8_t>& bytes) {
  bytes.resize(static_cast<size_t>(size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::pread(file.get(), bytes.data() + done, bytes.size() - done,
                                offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) base::throw_errno("reading " + path.string());
    if (got == 0) {
      throw base::UserError(
          fmt::format("{} ends at byte {}, where more was expected; it was cut short",
                      path.string(), offset + static_cast<int64_t>(done)));
    }
    done += static_cast<size_t>(got);
  }
}

void read_ahead(const base::UniqueFd& file, int64_t offset, int64_t size) {
  // The kernel limits a request to its read-ahead window, by default 128 KiB.
  constexpr int64_t kPiece = 128 << 10;
  constexpr int64_t kBlock = 8 * kPiece;
  const int64_t end = offset + size;
  for (int64_t block = offset; block < end; block += kBlock) {
    const int64_t block_end = std::min(block + kBlock, end);
    // For a cached block, reading one byte is faster than posix_fadvise, which looks up each page.
    char byte = 0;
    const iovec one{&byte, 1};
    if (::preadv2(file.get(), &one, 1, block_end - 1, RWF_NOWAIT) == 1) continue;
    for (int64_t at = block; at < block_end; at += kPiece) {
      ::posix_fadvise(file.get(), at, std::min(kPiece, block_end - at), POSIX_FADV_WILLNEED);
    }
  }
}

std::vector<uint8_t>& thread_buffer() {
  thread_local std::vector<uint8_t> buffer;
  return buffer;
}

std::span<const uint8_t> read_whole_file(const std::filesystem::path& path) {
  const base::UniqueFd file = base::open_regular_file(path);
  read_at(file, path, 0, size_of_file(file, path), thread_buffer());
  return thread_buffer();
}

std::string read_gzip_file(const std::filesystem::path& path, size_t max_bytes) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), &gzclose);
  if (!file) {
    base::open_regular_file(path);  // throws, and says why, unless memory is short
    refuse_file(path, "there is no memory left");
  }
  std::string bytes;
  std::array<char, 1 << 16> chunk;
  while (true) {
    const int got = gzread(file.get(), chunk.data(), chunk.size());
    if (got <= 0) break;
    bytes.append(chunk.data(), static_cast<size_t>(got));
    if (bytes.size() > max_bytes) {
      refuse_file(path, fmt::format("it holds more than {}", base::format_bytes(max_bytes)));
    }
  }
  const std::string unknown = bytes.empty() ? "it is empty" : "";
  for (const std::string& why : {failure(file.get()), base::foreign_file(bytes, unknown)}) {
    if (!why.empty()) refuse_file(path, why);
  }
  return bytes;
}

std::optional<int64_t> whole_number(std::string_view text) {
  if (const auto exact = base::parse_number<int64_t>(text)) return exact;
  constexpr std::string_view kAround = " \t\r\n\"\xef\xbb\xbf";
  text.remove_prefix(std::min(text.find_first_not_of(kAround), text.size()));
  text = text.substr(0, text.find_last_not_of(kAround) + 1);
  if (text == "true" || text == "True") return 1;
  if (text == "false" || text == "False") return 0;
  const auto value = base::parse_number<double>(text);
  return value ? whole_number(*value) : std::nullopt;
}

std::optional<int64_t> whole_number(double value) {
  constexpr double kMax = 9007199254740992;  // 2^53
  if (std::trunc(value) != value || std::abs(value) > kMax) return std::nullopt;
  return static_cast<int64_t>(value);
}

OpenFiles::OpenFiles(std::vector<Named> files, size_t max_open)
    : files_(std::move(files)), max_open_(max_open) {}

OpenFiles::File OpenFiles::open(size_t number) const {
  {
    const std::lock_guard lock(mutex_);
    if (File file = find(number)) return file;
  }
  // Without the lock: a slow file server must not block other threads.
  const auto& [path, stamp] = files_[number];
  auto opened = std::make_shared<const base::UniqueFd>(base::open_regular_file(path));
  // Not the inode, and st_ctim, which a new name or owner changes as well.
  const FileStamp now = stamp_of(*opened);
  if (now.size != stamp.size || now.modified_ns != stamp.modified_ns) {
    throw base::UserError(
        fmt::format("cannot read {}: it was written to or replaced since it was indexed; start the "
                    "run again",
                    path.string()));
  }
  const std::lock_guard lock(mutex_);
  if (File file = find(number)) return file;
  opened_.insert(opened_.begin(), {number, opened});
  if (opened_.size() > max_open_) opened_.pop_back();
  return opened;
}

OpenFiles::File OpenFiles::find(size_t number) const {
  const auto found = std::ranges::find(opened_, number, &Opened::number);
  if (found == opened_.end()) return nullptr;
  std::rotate(opened_.begin(), found, found + 1);
  return opened_.front().file;
}

bool equals_in_lower_case(std::string_view text, std::string_view lower) {
  return std::ranges::equal(text, lower,
                            [](unsigned char c, char l) { return std::tolower(c) == l; });
}

NameKind kind_of(std::string_view name) {
  constexpr std::array<std::string_view, 42> kExtensions = {
      ".jpg", ".jpeg", ".png",                             // kDecoded
      ".ppm", ".bmp",  ".pgm",  ".tif", ".tiff", ".webp",  // kTorchvisionImage
      ".jpe", ".jif",  ".jfif", ".jfi", ".jpf",  ".jpx",  ".jp2", ".j2k", ".jxl", ".jxr", ".apng",
      ".gif", ".heic", ".heif", ".hif", ".avif", ".dib",  ".pbm", ".pnm", ".tga", ".dng", ".cr2",
      ".cr3", ".nef",  ".arw",  ".orf", ".rw2",  ".raf",  ".exr", ".psd", ".ico", ".svg", ".dcm"};
  const std::string_view ending = name.substr(std::min(name.rfind('.'), name.size()));
  const auto found = std::ranges::find_if(
      kExtensions, [&](std::string_view one) { return equals_in_lower_case(ending, one); });
  if (found == kExtensions.end()) return NameKind::kNoImage;
  const auto at = found - kExtensions.begin();
  return at < 3 ? NameKind::kDecoded : at < 9 ? NameKind::kTorchvisionImage : NameKind::kOtherImage;
}

bool has_image_content(const std::filesystem::path& file) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) return false;  // a pipe would block
  std::array<uint8_t, kMagicBytes> bytes{};
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(bytes.data()), kMagicBytes);
  return is_jpeg(bytes) || is_png(bytes);
}

void FileCounts::add(const std::string& name, const std::string& kind) {
  if (count_++ == 0 || name < first_) first_ = name;
  const std::string extension = std::filesystem::path(name).extension().string();
  ++kinds_[!kind.empty() ? kind : extension.empty() ? "no extension" : extension];
}

std::string FileCounts::text() const {
  if (count_ == 0) return {};
  constexpr size_t kShown = 20;
  std::vector<std::string> kinds;
  for (const auto& [kind, count] : kinds_) {
    kinds.push_back(kinds_.size() == 1 ? kind : fmt::format("{} {}", count, kind));
  }
  return base::printable(fmt::format("{} ({}), such as '{}'", base::counted(count_, "file"),
                                     base::join_some(kinds, ", ", kShown), first_));
}

void add_remark(std::vector<Remark>& remarks, std::string_view what, const std::string& items,
                std::string_view why) {
  if (!items.empty()) remarks.push_back({.text = fmt::format("{}: {}: {}", what, items, why)});
}

std::vector<Remark> unreadable_remark(const UnreadableFiles& files) {
  if (files.empty()) return {};
  FileCounts counts;
  for (const auto& [name, kind] : files) counts.add(name, kind);
  const std::string link = base::dangling_link(files.begin()->first);
  const bool is_gone =
      std::ranges::none_of(files, [](const auto& file) { return file.second == kOtherContent; });
  return {{.text = fmt::format("{} cannot be read{}: {} (`train check` decodes all images)",
                               counts.text(), link.empty() ? "" : fmt::format(" ({})", link),
                               is_gone ? "copy them again, or remove them"
                                       : "convert them to JPEG or PNG (ImageMagick: mogrify "
                                         "-format png FILE), mend or remove them"),
           .is_fault = true,
           .unreadable = files}};
}

}  // namespace detail
}  // namespace syncbn::data
