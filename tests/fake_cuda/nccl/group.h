// ncclGroupStart() and ncclGroupEnd(): a thread's calls between them start at the end.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>
#include <vector>

#include "operations.h"

namespace fake_nccl {

/// The calls of one thread that have not started.
class Group {
 public:
  static Group& of_this_thread();

  void start() { ++depth_; }
  /// Starts all calls when the outermost group ends. Returns the first error, or ncclInProgress if
  /// a non-blocking communicator is busy.
  ncclResult_t end();

  ncclResult_t add(const std::shared_ptr<ncclComm>& communicator, cudaStream_t stream,
                   const Collective& collective);
  ncclResult_t add(const std::shared_ptr<ncclComm>& communicator, cudaStream_t stream,
                   const Transfer& transfer);
  /// A call in which hosts wait for each other; those of one group wait at the same time.
  ncclResult_t add(std::function<ncclResult_t()> job);

 private:
  /// Operations that are enqueued together: those on one communicator and stream.
  struct Batch {
    std::shared_ptr<ncclComm> communicator;
    cudaStream_t stream = nullptr;
    std::vector<Collective> collectives = {};
    std::vector<Transfer> transfers = {};
  };

  Batch& batch(const std::shared_ptr<ncclComm>& communicator, cudaStream_t stream);
  ncclResult_t start_unless_grouped() { return depth_ > 0 ? ncclSuccess : start_all(); }
  ncclResult_t start_all();

  int depth_ = 0;
  std::vector<std::function<ncclResult_t()>> jobs_;
  std::vector<Batch> batches_;
};

}  // namespace fake_nccl
