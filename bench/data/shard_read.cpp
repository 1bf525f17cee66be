// Times reading the samples of tar shards beside sequential reads of the same files, in blocks of
// 128 KiB (as cat does) and of 1 MiB. All by turns, on one thread, from the page cache.
//
//   shard_read [SAMPLE_BYTES] [SHARDS] [SAMPLES_PER_SHARD]      default: 110000 16 600
//
// Reads samples in ShardSampler's order, and reads ahead as the loader does.
#include <fmt/format.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>
#include <syncbn/data/shard_sampler.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../median.h"
#include "sets/file_bytes.h"
#include "sets/shard_index.h"
#include "support/temp_folder.h"

namespace {

using syncbn::bench::median;
using namespace syncbn;
using namespace syncbn::data;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::string header(const std::string& name, size_t size) {
  std::string block(512, '\0');
  block.replace(0, name.size(), name);
  block.replace(124, 11, fmt::format("{:011o}", size));
  block[156] = '0';
  block.replace(148, 8, "        ");
  int sum = 0;
  for (const char c : block) sum += static_cast<unsigned char>(c);
  block.replace(148, 7, fmt::format("{:06o}", sum) + '\0');
  return block;
}

fs::path write_shard(const fs::path& folder, int number, int samples, size_t sample_bytes) {
  std::mt19937_64 random(static_cast<uint64_t>(number));
  std::string image(sample_bytes, '\0');
  std::ranges::generate(image, [&] { return static_cast<char>(random()); });
  fs::path path = folder / fmt::format("{:04}.tar", number);
  const std::string padding((512 - sample_bytes % 512) % 512, '\0');
  std::string bytes;
  for (int i = 0; i < samples; ++i) {
    bytes += header(fmt::format("{}.jpg", i), sample_bytes);
    bytes += image;
    bytes += padding;
    bytes += header(fmt::format("{}.cls", i), 1);
    bytes += '1';
    bytes.append(511, '\0');
  }
  bytes.append(1024, '\0');
  // In one write, so that the page cache gets large folios, as it does for files read from disk.
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  return path;
}

/// Seconds.
double read_plainly(const std::vector<fs::path>& shards, int64_t block_bytes) {
  std::vector<uint8_t> block;
  const auto begin = Clock::now();
  for (const fs::path& shard : shards) {
    const auto file = base::open_regular_file(shard);
    const int64_t size = detail::size_of_file(file, shard);
    for (int64_t at = 0; at < size; at += block_bytes) {
      detail::read_at(file, shard, at, std::min(block_bytes, size - at), block);
    }
  }
  return base::seconds_since(begin);
}

double read_samples(const std::vector<fs::path>& shards, const detail::ShardIndex& index,
                    const ShardSampler& sampler) {
  std::vector<detail::OpenFiles::Named> named;
  named.reserve(shards.size());
  for (const fs::path& shard : shards) named.push_back({shard, detail::stamp_of(shard)});
  const detail::OpenFiles files(std::move(named));
  const auto order = sampler.indices();
  const auto stored = sampler.storage_order(order);
  std::vector<uint8_t> block;
  constexpr size_t kAtOnce = 256;  // four batches of 64, as Loader does it
  const auto begin = Clock::now();
  for (size_t i = 0; i < order.size(); ++i) {
    if (i % kAtOnce == 0) {
      const auto ahead = std::span(stored).subspan(i, std::min(kAtOnce, stored.size() - i));
      for (const auto& [shard, offset, size] : index.ranges(ahead)) {
        detail::read_ahead(*files.open(shard), offset, size);
      }
    }
    const auto& place = index[order[i]];
    detail::read_at(*files.open(place.shard), shards[place.shard],
                    static_cast<int64_t>(place.offset), place.size, block);
  }
  return base::seconds_since(begin);
}

}  // namespace

int main(int argc, char** argv) {
  const auto sample_bytes = argc > 1 ? static_cast<size_t>(std::atoll(argv[1])) : 110'000;
  const int shard_count = argc > 2 ? std::atoi(argv[2]) : 16;
  const int samples = argc > 3 ? std::atoi(argv[3]) : 600;
  const test::TempFolder folder;
  std::vector<fs::path> shards;
  shards.reserve(static_cast<size_t>(shard_count));
  for (int i = 0; i < shard_count; ++i) {
    shards.push_back(write_shard(folder.path(), i, samples, sample_bytes));
  }
  for (const char* round : {"first", "next"}) {
    const auto begin = Clock::now();
    detail::index_shards(shards, 10, "bench", {.folder = folder / "cache"});
    fmt::print("index of {} samples in {} shards, {} start: {:.3f} s\n", samples * shard_count,
               shard_count, round, base::seconds_since(begin));
  }
  const auto index = detail::index_shards(shards, 10, "bench", {.folder = folder / "cache"});
  const ShardSampler sampler(index.shard_ends(), {});
  double bytes = 0;
  for (const fs::path& shard : shards) bytes += static_cast<double>(fs::file_size(shard));
  const auto speed = [&](const std::vector<double>& seconds) {
    return base::format_bytes(static_cast<uint64_t>(bytes / median(seconds)));
  };
  for (const int64_t block_bytes : {128 << 10, 1 << 20}) {
    std::vector<double> plain;
    std::vector<double> sampled;
    std::vector<double> ratios;
    constexpr int kRounds = 15;
    for (int round = 0; round < kRounds; ++round) {
      plain.push_back(read_plainly(shards, block_bytes));
      sampled.push_back(read_samples(shards, index, sampler));
      ratios.push_back(plain.back() / sampled.back());
    }
    fmt::print(
        "samples of {} bytes: {}/s; plain reads of {} KiB: {}/s; ratio {:.2f} (median of {})\n",
        sample_bytes, speed(sampled), block_bytes >> 10, speed(plain), median(ratios), kRounds);
  }
}
