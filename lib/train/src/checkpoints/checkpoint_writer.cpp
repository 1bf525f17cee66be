#include "checkpoints/checkpoint_writer.h"

#include <syncbn/base/atomic_file.h>
#include <syncbn/dist/process_group.h>

#include <filesystem>
#include <system_error>
#include <utility>

namespace syncbn::train {

namespace fs = std::filesystem;

CheckpointWriter::~CheckpointWriter() {
  if (thread_.joinable()) thread_.join();
}

void CheckpointWriter::save(const Checkpoint& checkpoint, const BestChange& change, bool last) {
  wait();
  Checkpoint copy = copy_to_host(checkpoint);
  dist::throw_if_aborted();  // before the files are written: the copy is then of no use
  const int64_t former_step = saved_step_;
  if (last) saved_step_ = checkpoint.step;
  thread_ = std::thread([this, change, last, former_step, host = std::move(copy)]() mutable {
    try {
      write(std::move(host), change, last, former_step);
    } catch (...) {
      error_ = std::current_exception();
    }
  });
}

void CheckpointWriter::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

/// In this order, a run that crashes in between repeats the epoch and writes the best checkpoint
/// again.
void CheckpointWriter::write(Checkpoint checkpoint, const BestChange& change, bool last,
                             int64_t former_step) const {
  const fs::path& folder = folder_.path();
  if (change.write) {
    std::error_code ignored;
    if (change.aside && !base::exists(folder / *change.aside)) {
      fs::rename(folder / run_files::kBest, folder / *change.aside, ignored);
    }
    auto rank_buffers = std::exchange(checkpoint.rank_buffers, {});
    checkpoint.has_optimizer = false;
    write_checkpoint(checkpoint, folder / *change.write);
    if (change.remove) fs::remove(folder / *change.remove, ignored);
    checkpoint.has_optimizer = true;
    checkpoint.rank_buffers = std::move(rank_buffers);
  }
  if (!last) return;
  if (former_step != checkpoint.step) run_files::rotate(folder_.path(), former_step, keep_last_);
  write_checkpoint(checkpoint, folder_.last());
}

}  // namespace syncbn::train
