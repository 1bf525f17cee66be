#include "index/index_file.h"

#include <fmt/format.h>
#include <libdeflate.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace syncbn::data::detail {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t nanoseconds(const timespec& time) {
  return time.tv_sec * kSecond + time.tv_nsec;
}

FileStamp stamp_from(const struct stat& status) {
  return {.inode = status.st_ino,
          .size = static_cast<uint64_t>(status.st_size),
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim)};
}

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr uint64_t kAlignment = 8;
static_assert(sizeof(IndexHeader) % kAlignment == 0);

[[noreturn]] void fail(const char* what) {
  throw IndexFileError(fmt::format("{}: {}", what, std::strerror(errno)));
}

uint32_t checksum_of(const IndexHeader& header) {
  return libdeflate_crc32(0, &header, offsetof(IndexHeader, header_checksum));
}

void write_all(const base::UniqueFd& file, const void* bytes, size_t size, uint64_t offset) {
  const auto* from = static_cast<const char*>(bytes);
  for (size_t done = 0; done < size;) {
    const ssize_t n =
        ::pwrite(file.get(), from + done, size - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write an index");
    done += static_cast<size_t>(n);
  }
}

/// Checks everything but the checksum of the sections.
bool is_sound(const IndexHeader& header, uint64_t size) {
  const IndexHeader own;
  if (header.magic != own.magic || header.version != own.version ||
      header.byte_order != own.byte_order || header.file_size != size ||
      header.header_checksum != checksum_of(header)) {
    return false;
  }
  return std::ranges::all_of(header.sections, [&](const IndexHeader::Section& section) {
    return section.offset % kAlignment == 0 && section.offset <= size &&
           section.size <= size - section.offset;
  });
}

}  // namespace

FileStamp stamp_of(const std::filesystem::path& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? stamp_from(status) : FileStamp{};
}

FileStamp stamp_of(const base::UniqueFd& file) {
  struct stat status {};
  return ::fstat(file.get(), &status) == 0 ? stamp_from(status) : FileStamp{};
}

FileStamp settled_stamp_of(const std::filesystem::path& path) {
  // A file that is written continuously never settles.
  constexpr int kMaxRounds = 5;
  FileStamp stamp = stamp_of(path);
  for (int round = 0; round < kMaxRounds; ++round) {
    const auto now = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch());
    const int64_t age = now.count() - std::max(stamp.modified_ns, stamp.changed_ns);
    // Upper bound on the resolution of the clock behind the file's times, in nanoseconds.
    const bool in_seconds = stamp.modified_ns % kSecond == 0 && stamp.changed_ns % kSecond == 0;
    const int64_t tick = in_seconds ? 2 * kSecond : kSecond / 50;
    // A timestamp in the future means the file server's clock is ahead: do not wait for it.
    if (age < 0 || age >= tick) break;
    std::this_thread::sleep_for(std::chrono::nanoseconds(tick - age));
    stamp = stamp_of(path);
  }
  return stamp;
}

IndexWriter::IndexWriter(const base::UniqueFd& file) : file_(file) {
  buffer_.reserve(kBufferBytes);
}

void IndexWriter::begin(size_t section) {
  end_section();
  section_ = section;
  header_.sections.at(section).offset = at_;
}

void IndexWriter::add_bytes(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::string_view part = bytes.substr(0, kBufferBytes - buffer_.size());
    buffer_ += part;
    at_ += part.size();
    bytes.remove_prefix(part.size());
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void IndexWriter::finish(uint64_t fingerprint) {
  end_section();
  flush();
  header_.file_size = at_;
  header_.fingerprint = fingerprint;
  header_.header_checksum = checksum_of(header_);
  write_all(file_, &header_, sizeof header_, 0);
}

void IndexWriter::end_section() {
  if (!section_) return;
  auto& section = header_.sections[*section_];
  section.size = at_ - section.offset;
  add_bytes(std::string((kAlignment - at_ % kAlignment) % kAlignment, '\0'));
  section_.reset();
}

void IndexWriter::flush() {
  write_all(file_, buffer_.data(), buffer_.size(), at_ - buffer_.size());
  header_.body_checksum = libdeflate_crc32(header_.body_checksum, buffer_.data(), buffer_.size());
  buffer_.clear();
}

std::optional<MappedIndex> MappedIndex::open(const base::UniqueFd& file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail("cannot read an index");
  const auto size = static_cast<size_t>(status.st_size);
  if (size < sizeof(IndexHeader)) return std::nullopt;
  void* bytes = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
  if (bytes == MAP_FAILED) fail("cannot map an index");
  MappedIndex index(MappedBytes(static_cast<char*>(bytes), {size}));
  if (!is_sound(index.header(), size)) return std::nullopt;
  const uint32_t body = libdeflate_crc32(0, &index.header() + 1, size - sizeof(IndexHeader));
  if (body != index.header().body_checksum) return std::nullopt;
  return index;
}

}  // namespace syncbn::data::detail
