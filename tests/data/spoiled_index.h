#pragma once

#include <fcntl.h>

#include <filesystem>
#include <string>
#include <vector>

#include <syncbn/base/unique_fd.h>

#include "index/index_file.h"

namespace syncbn::test {

/// Replaces 8 bytes of a section of the only index in `cache`, and corrects the file's checksums.
/// Returns false if the section is shorter.
inline bool spoil_index(const std::filesystem::path& cache, size_t section, size_t word) {
  using namespace data::detail;
  std::filesystem::path path;
  for (const auto& entry : std::filesystem::directory_iterator(cache)) {
    if (entry.path().extension() == ".index") path = entry.path();
  }
  std::vector<std::string> sections;
  uint64_t fingerprint = 0;
  {
    const auto index = MappedIndex::open(base::UniqueFd(::open(path.c_str(), O_RDONLY)));
    for (size_t i = 0; i < kMaxSections; ++i) sections.emplace_back(index->text(i));
    fingerprint = index->fingerprint();
  }
  std::string& spoiled = sections[section];
  if (spoiled.size() < (word + 1) * sizeof(uint64_t)) return false;
  spoiled.replace(word * sizeof(uint64_t), sizeof(uint64_t), sizeof(uint64_t), '\xfe');
  const base::UniqueFd file(::open(path.c_str(), O_RDWR | O_TRUNC));
  IndexWriter writer(file);
  for (size_t i = 0; i < kMaxSections; ++i) {
    writer.begin(i);
    writer.add_bytes(sections[i]);
  }
  writer.finish(fingerprint);
  return true;
}

}  // namespace syncbn::test
