// Measures the index of an image folder: time to build, bytes of its file, memory of each rank.
//
//   index_memory [FILES] [FOLDERS] [RANKS]      default: 10000000 1000 4
//
// Needs no files: it gives the index made-up names, as a scan of folders would.
#include <fmt/format.h>
#include <syncbn/base/text.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "index/index_cache.h"
#include "sets/folder_index.h"
#include "support/temp_folder.h"

namespace {

using namespace syncbn;
using namespace syncbn::data::detail;
using Clock = std::chrono::steady_clock;

struct Size {
  int64_t files = 10'000'000;
  int64_t folders = 1000;
  int ranks = 4;
};

/// Adds names as long as ImageNet's: "n00001234/n00001234_5678.JPEG".
uint64_t build(const Size& size, IndexWriter& out) {
  FolderIndexWriter writer(out);
  std::vector<std::string> classes;
  for (int64_t folder = 0; folder < size.folders; ++folder) {
    const std::string name = fmt::format("n{:08}", folder);
    // The scan sorts a folder's names before it passes them on.
    NameList names;
    for (int64_t i = folder; i < size.files; i += size.folders) {
      names.add(fmt::format("{}_{}.JPEG", name, i));
    }
    names.sort();
    writer.begin_folder(name, {}, folder);
    for (int64_t i = 0; i < names.size(); ++i) writer.add_file(names[i], /*is_unreadable=*/false);
    classes.push_back(name);
  }
  return writer.finish(classes);
}

/// A field of a file such as /proc/self/status, in bytes.
uint64_t kilobytes_field(const char* file, const std::string& field) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(field + ":")) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

struct Shared {
  std::atomic<int> opened = 0;
  std::atomic<int> measured = 0;
  std::atomic<uint64_t> sum_of_pss = 0;
};

/// Counts this rank, and waits for the others.
void meet(std::atomic<int>& count, int all) {
  ++count;
  while (count < all) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void run_rank(int rank, const Size& size, const std::filesystem::path& folder, Shared& shared) {
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  const uint64_t before = kilobytes_field("/proc/self/smaps_rollup", "Pss");
  const auto begin = Clock::now();
  const FolderIndex index(open_index(
      {.name = "index_memory",
       .key = "made-up names",
       .is_current = [](const MappedIndex&) { return true; },
       .build =
           [&](IndexWriter& out) {
             const uint64_t fingerprint = build(size, out);
             fmt::print("rank {} built it in {:.1f} s, its memory then at most {}\n", rank,
                        std::chrono::duration<double>(Clock::now() - begin).count(),
                        base::format_bytes(kilobytes_field("/proc/self/status", "VmHWM")));
             return fingerprint;
           }},
      {.folder = folder}));
  const std::chrono::duration<double> took = Clock::now() - begin;
  meet(shared.opened, size.ranks);
  const uint64_t rss = kilobytes_field("/proc/self/smaps_rollup", "Rss");
  const uint64_t pss = kilobytes_field("/proc/self/smaps_rollup", "Pss");
  shared.sum_of_pss += pss - before;
  fmt::print("rank {} had {} files after {:.1f} s; RSS {}, PSS {}, before the index {}\n", rank,
             index.size(), took.count(), base::format_bytes(rss), base::format_bytes(pss),
             base::format_bytes(before));
  std::fflush(stdout);
  meet(shared.measured, size.ranks);
}

}  // namespace

int main(int argc, char** argv) {
  Size size;
  if (argc > 1) size.files = std::atoll(argv[1]);
  if (argc > 2) size.folders = std::atoll(argv[2]);
  if (argc > 3) size.ranks = std::atoi(argv[3]);
  const test::TempFolder folder;
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& shared = *new (memory) Shared;
  for (const char* round : {"first start", "next start"}) {
    fmt::print("{}, {} files in {} folders:\n", round, size.files, size.folders);
    std::fflush(stdout);
    shared.opened = shared.measured = 0;
    shared.sum_of_pss = 0;
    for (int rank = 0; rank < size.ranks; ++rank) {
      if (::fork() != 0) continue;
      run_rank(rank, size, folder.path(), shared);
      ::_exit(0);
    }
    while (::wait(nullptr) > 0) {
    }
    fmt::print("all {} ranks together: {} for the index\n", size.ranks,
               base::format_bytes(shared.sum_of_pss));
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path().extension() == ".index") {
      fmt::print("index file: {}\n", base::format_bytes(entry.file_size()));
    }
  }
}
