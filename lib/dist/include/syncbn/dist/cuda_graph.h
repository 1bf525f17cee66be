#pragma once

#include <functional>
#include <memory>

namespace syncbn::dist {

/// Work on a GPU that is recorded once and then launched as a whole: one launch in place of
/// hundreds. Each launch reads and writes the memory that the work used when it was recorded, so
/// inputs have to be copied there. Not thread-safe.
class CudaGraph {
 public:
  virtual ~CudaGraph() = default;

  /// Records what `work` launches on the current stream, and on streams that wait for it: kernels,
  /// a backward, collectives over NCCL. Nothing runs. Call it once. All ranks of a group must
  /// record their collectives in the same order.
  ///
  /// The current stream must not be the default one. Everything that the work differentiates must
  /// have been created under that stream as well, DistributedDataParallel included, and must have
  /// run at least 11 times before: DistributedDataParallel reads timers in its first 10 steps.
  /// @throws c10::Error if the work waits for the device, or does something else that cannot be
  ///   recorded; what `work` throws. The graph cannot be used afterwards.
  virtual void capture(const std::function<void()>& work) = 0;

  /// Runs the recorded work on the current stream, without waiting for it. If a rank of a recorded
  /// collective's group ends meanwhile, or the work has not ended after the group's timeout (from
  /// this call, or from the end of the previous replay), the group is aborted: the work then ends
  /// with undefined results, and throw_if_aborted() and the next replay() name the rank that has
  /// ended, is stopped, or has not called replay().
  /// @throws PeerError or base::UserError (see throw_if_aborted()) if any group was aborted, in
  ///   each call from then on.
  virtual void replay() = 0;
};

/// A graph for the current device.
/// @throws base::UserError if this process does not use GPUs.
std::unique_ptr<CudaGraph> make_cuda_graph();

}  // namespace syncbn::dist
