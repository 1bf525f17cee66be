#include "sets/tar_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"

namespace syncbn::data::detail {
namespace {

constexpr int64_t kBlock = 512;
/// Bytes to read at once after an archive: at first, for many short archives, and at most, for
/// gigabytes of zero blocks.
constexpr int64_t kMinPadding = 1 << 14;
constexpr int64_t kMaxPadding = 1 << 20;
constexpr int64_t kMaxNameBytes = 1 << 16;  // of a header that holds a long name

/// The block in front of each member.
class Header {
 public:
  explicit Header(const std::vector<uint8_t>& block)
      : text_(reinterpret_cast<const char*>(block.data()), block.size()) {}

  char type() const { return text_[156]; }

  std::string name() const {
    const std::string name(field(0, 100));
    const bool is_ustar = text_.substr(257, 6) == std::string_view("ustar\0", 6);
    const std::string_view prefix = is_ustar ? field(345, 155) : std::string_view();
    return prefix.empty() ? name : fmt::format("{}/{}", prefix, name);
  }

  /// Negative if the field is not a number.
  int64_t size() const { return number(124, 12); }

  /// The checksum is the sum of all bytes, with its own field counted as spaces.
  bool has_right_sum() const {
    int64_t sum = 0;
    for (size_t i = 0; i < text_.size(); ++i) {
      sum += i >= 148 && i < 156 ? ' ' : static_cast<uint8_t>(text_[i]);
    }
    return number(148, 8) == sum;
  }

 private:
  std::string_view field(size_t begin, size_t size) const {
    const std::string_view all = text_.substr(begin, size);
    return all.substr(0, all.find('\0'));
  }

  /// Octal digits, or the byte 0x80 and a big-endian number (GNU tar, for files of 8 GB and more).
  int64_t number(size_t begin, size_t size) const {
    const std::string_view raw = text_.substr(begin, size);
    if (static_cast<uint8_t>(raw[0]) == 0x80) {
      uint64_t value = 0;
      for (const char c : raw.substr(size - 8)) value = value << 8 | static_cast<uint8_t>(c);
      return value >> 62 != 0 ? -1 : static_cast<int64_t>(value);
    }
    std::string_view digits = raw;
    while (digits.starts_with(' ')) digits.remove_prefix(1);
    int64_t value = 0;
    const auto [stop, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), value, 8);
    const bool ends = stop == digits.data() + digits.size() || *stop == ' ' || *stop == '\0';
    return error == std::errc() && ends ? value : -1;
  }

  std::string_view text_;
};

/// The last value of `key` in pax records ("<length> <key>=<value>\n"), or "".
std::string pax_value(std::string_view records, std::string_view key) {
  std::string found;
  while (!records.empty()) {
    const size_t digits = records.find(' ');
    const auto length = base::parse_number<size_t>(records.substr(0, digits));
    if (!length || *length <= digits + 1 || *length > records.size()) return found;
    const std::string_view record = records.substr(digits + 1, *length - digits - 2);
    if (record.size() > key.size() && record.starts_with(key) && record[key.size()] == '=') {
      found = record.substr(key.size() + 1);
    }
    records.remove_prefix(*length);
  }
  return found;
}

class TarReader {
 public:
  TarReader(const base::UniqueFd& file, const std::filesystem::path& path)
      : file_(file), path_(path), end_(size_of_file(file, path)) {}

  /// The result of for_each_tar_member().
  bool run(const std::function<void(const TarMember&)>& visit) {
    if (end_ == 0) fail("", "it is empty");
    bool is_closed = false;
    int64_t piece = kBlock;  // bytes to read
    while (at_ < end_) {
      read_at(file_, path_, at_, std::min(piece, end_ - at_), block_);
      const auto used = std::ranges::find_if(block_, [](uint8_t byte) { return byte != 0; });
      const auto zeros = used - block_.begin();
      const auto padding = used == block_.end() ? zeros : zeros / kBlock * kBlock;
      at_ += padding > 0 ? padding : kBlock;
      is_closed = is_closed || padding > 0;
      piece = used == block_.end() ? std::clamp(2 * piece, kMinPadding, kMaxPadding) : kBlock;
      if (padding > 0) continue;
      block_.resize(std::min(block_.size(), size_t{kBlock}));
      const Header header(block_);
      const bool is_header = std::ssize(block_) == kBlock && header.has_right_sum();
      // Another archive may follow. Anything else there is ignored, as tar does.
      if (is_closed && !is_header) return true;
      is_closed = false;
      take(header, visit);
    }
    return is_closed;
  }

 private:
  void take(const Header& header, const std::function<void(const TarMember&)>& visit) {
    if (std::ssize(block_) < kBlock) fail_here("it was cut short");
    if (!header.has_right_sum()) fail_here("it is not a tar file, or damaged");
    TarMember member{long_name_.empty() ? header.name() : long_name_, at_,
                     long_size_ >= 0 ? long_size_ : header.size()};
    if (member.size < 0 || member.size > end_ - member.offset) {
      fail(member.name, "it is longer than the rest of the file, which was cut short or damaged");
    }
    at_ = member.offset + (member.size + kBlock - 1) / kBlock * kBlock;
    const char type = header.type();
    if (type == 'L' || type == 'x') return keep_for_next(member, type);
    if (type == 'g') return;  // describes the archive
    long_name_.clear();
    long_size_ = -1;
    if (type == '5') return;
    check(member.name, type);
    visit(member);
  }

  /// Reads a header that holds the next member's long name or size.
  void keep_for_next(const TarMember& member, char type) {
    if (member.size > kMaxNameBytes) fail(member.name, "its header with a long name is too long");
    read_at(file_, path_, member.offset, member.size, text_);
    const std::string_view text(reinterpret_cast<const char*>(text_.data()), text_.size());
    if (type == 'L') {
      long_name_ = text.substr(0, text.find('\0'));
      return;
    }
    long_name_ = pax_value(text, "path");
    const std::string size = pax_value(text, "size");
    const auto number = base::parse_number<int64_t>(size);
    if (!size.empty() && number.value_or(-1) < 0)
      fail(member.name, "the size in its header is negative or not a number");
    long_size_ = number.value_or(-1);
  }

  void check(const std::string& name, char type) const {
    if (type == '1' || type == '2') fail(name, "it is a link, which shards must not hold");
    if (type != '0' && type != '\0' && type != '7') {
      fail(name, "it is neither a file nor a folder");
    }
    if (name.starts_with('/')) fail(name, "its name is absolute");
    for (const auto& part : std::filesystem::path(name)) {
      if (part == "..") fail(name, "its name leads out of the archive ('..')");
    }
  }

  /// Names what the file is instead of an archive, if its first block shows that.
  [[noreturn]] void fail_here(const std::string& why) const {
    const std::string_view block(reinterpret_cast<const char*>(block_.data()), block_.size());
    fail("", at_ == kBlock ? base::foreign_file(block, why) : why);
  }

  [[noreturn]] void fail(const std::string& member, const std::string& why) const {
    const std::string which =
        member.empty() ? "" : fmt::format(", member '{}'", base::printable(member.substr(0, 200)));
    throw base::UserError(
        fmt::format("cannot read the shard '{}'{}: {}", path_.string(), which, why));
  }

  const base::UniqueFd& file_;
  const std::filesystem::path& path_;
  const int64_t end_;
  int64_t at_ = 0;
  std::vector<uint8_t> block_;
  std::vector<uint8_t> text_;
  std::string long_name_;
  int64_t long_size_ = -1;
};

}  // namespace

bool for_each_tar_member(const base::UniqueFd& file, const std::filesystem::path& path,
                         const std::function<void(const TarMember&)>& visit) {
  return TarReader(file, path).run(visit);
}

}  // namespace syncbn::data::detail
