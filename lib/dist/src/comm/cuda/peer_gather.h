#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <ATen/cuda/CUDAEvent.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cuda/peer_gather_arguments.h"

namespace syncbn::dist::detail {

/// A gather that has been launched.
class PeerGatherWork : public c10d::Work {
 public:
  using Event = std::shared_ptr<at::cuda::CUDAEvent>;
  PeerGatherWork(Event begin, Event end) : begin_(std::move(begin)), end_(std::move(end)) {}

  /// Null unless time is measured.
  const Event& begin() const { return begin_; }
  const Event& end() const { return end_; }
  bool isCompleted() override { return end_->query(); }
  /// Makes the current stream wait, not the host.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }

 private:
  const Event begin_;
  const Event end_;
};

/// Gathers rows of float64 through memory of each rank's GPU that all ranks of a group reach. One
/// kernel on the current stream does it: its own, or the one that computes the row
/// (GatherByOwnKernel). Implements nothing else of c10d::Backend.
class PeerGather : public c10d::Backend {
 public:
  /// Only connect() calls it.
  PeerGather(int rank, int size, at::Device device);

  /// Every rank of the group calls it, and waits for the others in the store. transport/README.md
  /// says why it uses CUDA's IPC.
  /// @param wanted the options' peer_memory
  /// @param why_not if it returns null: what prevents it on some rank, equal on all ranks
  static c10::intrusive_ptr<PeerGather> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size, at::Device device, bool wanted,
                                                std::string& why_not);
  ~PeerGather() override;

  const std::string getBackendName() const override { return "syncbn_peers"; }
  /// @param output [W, n] and input [1, n]: float64 on the device, with n up to kMaxPeerRow
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  /// Sets the tag of the next gather: equal on ranks that make the same call.
  void set_tag(uint64_t tag) { tag_ = tag; }

  /// Makes later works record when they begin and end on the GPU.
  void measure_time() { measures_time_ = true; }

  /// Ends kernels that wait for other ranks; later kernels do not wait. Thread-safe.
  void abort();
  /// Waits for this rank's gathers, and unmaps the other ranks' memory. The caller bounds the wait:
  /// abort() from another thread ends it, unless kernels of other code still run.
  void shutdown() override;

 private:
  void close_to_others();

  bool is_closed_ = false;
  const at::Device device_;
  cuda::PeerGatherArguments arguments_;
  unsigned* aborted_ = nullptr;  ///< pinned host memory, which the kernels read
  uint64_t tag_ = 0;
  bool measures_time_ = false;
  PeerGatherWork::Event last_;
};

}  // namespace syncbn::dist::detail
