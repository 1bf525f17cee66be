#include "checkpoints/keepers.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <system_error>

#include "common/rank_0.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// The deepest folder on the way to `path` that exists.
fs::path existing_part(fs::path path) {
  std::error_code ignored;
  while (!path.empty() && !fs::is_directory(path, ignored)) path = path.parent_path();
  return path.empty() ? fs::path(".") : path;
}

}  // namespace

Keepers::Keepers(bool of_each_node, const fs::path& folder)
    : is_one_(of_each_node ? dist::local_rank() == 0 || is_rank_0() : is_rank_0()) {
  if (of_each_node) leave_if_shared(existing_part(folder));
}

void Keepers::each(const std::function<void()>& work) const {
  on_each_rank([&] {
    if (is_one_) work();
  });
}

void Keepers::copy_missing(const fs::path& folder, const std::vector<std::string>& files,
                           int source) const {
  if (count_ == 1) return;
  std::istringstream names(dist::broadcast_bytes(base::join(files, "\n"), source));
  for (std::string name; std::getline(names, name);) {
    const fs::path file = folder / name;
    const bool lacks = is_one_ && !base::exists(file);
    const auto all = dist::all_gather_bytes(lacks ? "lacks" : "");
    if (std::ranges::count(all, "lacks") == 0) continue;
    std::string bytes;
    if (dist::rank() == source) bytes = base::read_file(file);
    bytes = dist::broadcast_bytes(bytes, source);
    each([&] {
      if (lacks) base::write_file_atomically(file, bytes);
    });
  }
}

/// Of the keepers that see the same folder, only the one with the lowest rank stays one.
void Keepers::leave_if_shared(const fs::path& folder) {
  const std::string job = on_rank_0([] { return fmt::format("{:08x}", std::random_device()()); });
  const auto token = [&](int rank) { return folder / fmt::format(".keeper-{}-{}", job, rank); };
  each([&] { base::write_file_atomically(token(dist::rank()), ""); });
  bool stays = is_one_;
  for (int rank = 0; rank < dist::rank(); ++rank) {
    stays = stays && !base::exists(token(rank));
  }
  dist::barrier();
  std::error_code ignored;
  if (is_one_) fs::remove(token(dist::rank()), ignored);
  is_one_ = stays;
  const auto all = dist::all_gather_bytes(is_one_ ? "keeper" : "");
  count_ = static_cast<int>(std::ranges::count(all, "keeper"));
}

}  // namespace syncbn::train
