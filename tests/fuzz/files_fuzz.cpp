// Feeds bytes to the readers of configurations, tar shards, index files, and the log lines and
// tables of runs. The first byte selects the reader.
#include <libdeflate.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/csv.h"
#include "index/index_file.h"
#include "memory_file.h"
#include "records/log_record.h"
#include "report/confusion.h"
#include "report/number_table.h"
#include "require.h"
#include "sets/folder_index.h"
#include "sets/shard_index.h"
#include "sets/tar_index.h"

namespace {

using namespace syncbn;

void read_yaml(const std::string& text) {
  const std::string written = config::to_yaml(config::parse_yaml(text, "file"));
  try {
    require(config::to_yaml(config::parse_yaml(written, "file")) == written);
  } catch (const base::UserError&) {
    require(false);  // it must be readable again
  }
}

/// Corrects the checksums of the blocks, most of which are headers: a fuzzer does not guess them.
void read_tar(std::string bytes) {
  constexpr size_t kBlock = 512;
  constexpr size_t kSum = 148;
  for (size_t block = 0; block + kBlock <= bytes.size(); block += kBlock) {
    bytes.replace(block + kSum, 8, 8, ' ');
    unsigned sum = 0;
    for (size_t i = 0; i < kBlock; ++i) sum += static_cast<uint8_t>(bytes[block + i]);
    for (size_t digit = 6; digit-- > 0; sum /= 8) {
      bytes[block + kSum + digit] = static_cast<char>('0' + sum % 8);
    }
  }
  const auto size = static_cast<int64_t>(bytes.size());
  data::detail::for_each_tar_member(
      memory_file(bytes), "file", [size](const data::detail::TarMember& member) {
        require(member.offset >= 0 && member.size >= 0 && member.size <= size - member.offset);
        require(!member.name.starts_with('/') && !member.name.starts_with("../"));
      });
}

/// Reads every sample of an index that is_sound() accepts.
void read_samples(const base::UniqueFd& file) {
  using namespace data::detail;
  constexpr int64_t kClasses = 10;
  const auto open = [&] { return std::move(*MappedIndex::open(file)); };
  if (ShardIndex::is_sound(open(), kClasses)) {
    const ShardIndex index(open());
    // Real files are not larger, and stamps are those of real files.
    for (const FileStamp& shard : index.stamps()) {
      if (shard.size > INT64_MAX) return;
    }
    std::vector<int64_t> samples(static_cast<size_t>(index.size()));
    std::iota(samples.begin(), samples.end(), 0);
    for (const ShardIndex::Range& range : index.ranges(samples)) {
      const FileStamp& shard = index.stamps()[range.shard];
      require(range.offset >= 0 && range.size >= 0 &&
              range.size <= static_cast<int64_t>(shard.size));
    }
    for (const int64_t label : index.labels()) require(label >= 0 && label < kClasses);
  }
  for (const bool has_classes : {false, true}) {
    if (!FolderIndex::is_sound(open(), has_classes)) continue;
    const FolderIndex index(open());
    for (int64_t i = 0; i < index.size(); ++i) static_cast<void>(index.file(i));
    const int64_t classes = std::ssize(index.classes());
    require(std::ssize(index.labels()) == (has_classes ? index.size() : 0));
    for (const int64_t label : index.labels()) require(label >= 0 && label < classes);
  }
}

/// @param bytes the table of sections and the data after the header
void read_index(std::string_view bytes) {
  data::detail::IndexHeader header;
  const size_t table = std::min(bytes.size(), sizeof(header.sections));
  std::memcpy(&header.sections, bytes.data(), table);
  bytes.remove_prefix(table);
  header.file_size = sizeof(header) + bytes.size();
  header.body_checksum = libdeflate_crc32(0, bytes.data(), bytes.size());
  header.header_checksum =
      libdeflate_crc32(0, &header, offsetof(data::detail::IndexHeader, header_checksum));
  std::string file(reinterpret_cast<const char*>(&header), sizeof(header));
  const base::UniqueFd written = memory_file(file.append(bytes));
  const auto index = data::detail::MappedIndex::open(written);
  for (size_t section = 0; index && section < data::detail::kMaxSections; ++section) {
    const std::string_view text = index->text(section);
    static_cast<void>(std::ranges::count(text, 'x'));  // touches each byte
    require(index->array<int64_t>(section).size() == text.size() / sizeof(int64_t));
  }
  if (index) read_samples(written);
}

void read_log(std::string_view text) {
  train::NumberTable table;
  while (!text.empty()) {
    const std::string line(text.substr(0, text.find('\n')));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    train::parse_record(line);
    const auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) table.add(json);
  }
  require(table.thinned(2).rows() <= 2);
  static_cast<void>(
      table.json().dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

/// Reads a table of a run's folder.
void read_table(const std::string& text) {
  const auto rows = train::csv_rows(text);
  std::string written;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      written += (i > 0 ? "," : "") + train::csv_field(row[i]);
    }
    written += "\n";
  }
  require(train::csv_rows(written) == rows);
  static_cast<void>(train::confusion_json(rows).dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  try {
    switch (data[0] % 5) {
      case 0:
        read_yaml(bytes);
        break;
      case 1:
        read_tar(bytes);
        break;
      case 2:
        read_index(bytes);
        break;
      case 3:
        read_log(bytes);
        break;
      default:
        read_table(bytes);
    }
  } catch (const base::UserError&) {
  }
  return 0;
}
