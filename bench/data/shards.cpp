// Reads tar shards by turns through the loader and plainly, and prints the bytes per second of both
// as a line of JSON for each pair. bench/data/run.py makes the shards.
//
//   data_shards PATTERN PAIRS FILE...        FILE: the files that PATTERN names
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include <syncbn/base/unique_fd.h>
#include <syncbn/data/loader.h>

#include "../components.h"
#include "support/temp_folder.h"

namespace {

namespace data = syncbn::data;

constexpr size_t kChunk = 1 << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds of an epoch in the shards' order, on one thread.
double by_loader(data::Loader& loader) {
  const double begin = now();
  loader.start_epoch(0);
  while (loader.next()) {
  }
  return now() - begin;
}

double plainly(const std::vector<std::string>& files) {
  std::vector<char> chunk(kChunk);
  const double begin = now();
  for (const std::string& path : files) {
    const syncbn::base::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    while (::read(file.get(), chunk.data(), chunk.size()) > 0) {
    }
  }
  return now() - begin;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fmt::print(stderr, "usage: data_shards PATTERN PAIRS FILE...\n");
    return 2;
  }
  const std::vector<std::string> files(argv + 3, argv + argc);
  uint64_t bytes = 0;
  for (const std::string& file : files) bytes += std::filesystem::file_size(file);
  const syncbn::test::TempFolder cache;
  const auto dataset = syncbn::bench::component<data::DatasetKind>(
                           fmt::format("{{type: tar_shards, train: '{0}', test: '{0}', classes: 1, "
                                       "transforms: [{{type: center_crop, size: 8}}], "
                                       "cache_dir: '{1}'}}",
                                       argv[1], cache.path().string()))
                           .make(data::Split::kTrain);
  data::Loader loader(dataset, {.batch_size = 16});
  // Reads everything once, so that it is in the page cache.
  plainly(files);
  by_loader(loader);
  for (int pair = 0; pair < std::stoi(argv[2]); ++pair) {
    const double first = pair % 2 == 0 ? by_loader(loader) : plainly(files);
    const double second = pair % 2 == 0 ? plainly(files) : by_loader(loader);
    const auto rate = [&](double seconds) { return static_cast<double>(bytes) / seconds; };
    fmt::print("[{}, {}]\n", rate(pair % 2 == 0 ? first : second),
               rate(pair % 2 == 0 ? second : first));
  }
  return 0;
}
