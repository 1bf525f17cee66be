#include "sets/open_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <syncbn/base/error.h>

#include "sets/file_bytes.h"

namespace syncbn::data::detail {
namespace {

/// Ignores the time of change, which a new name or owner sets too.
bool has_same_content(const FileStamp& a, const FileStamp& b) {
  return a.size == b.size && a.modified_ns == b.modified_ns;
}

}  // namespace

OpenFiles::OpenFiles(std::vector<Named> files, size_t max_open)
    : files_(std::move(files)), max_open_(max_open) {}

OpenFiles::File OpenFiles::open(size_t number) const {
  {
    const std::lock_guard lock(mutex_);
    if (File file = find(number)) return file;
  }
  // Without the lock: a slow file server must not block other threads.
  const auto& [path, stamp] = files_[number];
  auto opened = std::make_shared<const base::UniqueFd>(open_file(path));
  if (!has_same_content(stamp_of(*opened), stamp)) {
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

}  // namespace syncbn::data::detail
