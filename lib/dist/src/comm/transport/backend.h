#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "monitor/flight_recorder.h"
#include "monitor/in_flight_headers.h"
#include "monitor/peer_monitor.h"

namespace syncbn::dist::detail::shm {
class SharedMemory;
}

namespace syncbn::dist::detail {

struct Label;

/// The one backend behind every process group of ours: all collectives pass through it, CPU tensors
/// on their way to shared memory or Gloo and CUDA tensors to NCCL. It numbers them, logs them for
/// the PeerMonitor, and turns the libraries' errors into ones that name rank, collective, sequence
/// number, group and cause. Registered as BackendType::CUSTOM, since c10d's Logger casts a backend
/// of type GLOO to ProcessGroupGloo.
class Backend : public c10d::Backend {
 public:
  struct Delegates {
    c10::intrusive_ptr<c10d::Backend> cpu;   ///< never null
    c10::intrusive_ptr<c10d::Backend> cuda;  ///< null without NCCL
    /// For what it knows of CPU tensors; null where ranks are on several hosts, or Python's.
    std::shared_ptr<shm::SharedMemory> shared;
  };

  /// Who belongs to the group.
  struct Members {
    std::vector<int> ranks;  ///< in the world
    int world_size = 1;
  };

  /// @param watch null where some ranks are not processes of this library: then nothing is added to
  ///   what Gloo sends.
  Backend(Delegates delegates, std::string group_name, std::chrono::milliseconds timeout,
          Members members, const std::shared_ptr<PeerMonitor>& watch);
  ~Backend() override;

  const std::string& group_name() const { return group_name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  const Members& members() const { return members_; }
  /// The number of collectives started so far on this rank.
  uint64_t sequence() const { return sequence_; }
  /// Whether a PeerMonitor compares what ranks call.
  bool is_watched() const { return is_watched_; }
  bool shares_memory() const { return delegates_.shared != nullptr; }
  InFlightHeaders& in_flight_headers() { return in_flight_headers_; }
  /// Of the collectives, those that went through shared memory.
  uint64_t shared_calls() const { return shared_calls_; }

  /// Whether gather_at_once() serves for such rows of each rank; the same on all ranks.
  bool gathers_at_once(const at::Tensor& row) const;
  /// _allgather_base() of a few values on the CPU, and its wait(), in one, with next to nothing
  /// around, in the way of every layer that exchanges statistics: c10d's dispatcher and what
  /// listens to it (profilers, NCCL's recorder) do not hear of it.
  /// @param all [W, n], contiguous, with this rank's row in its place.
  /// @param timeout c10d::kUnsetTimeout: the group's.
  void gather_at_once(const at::Tensor& all, std::chrono::milliseconds timeout);

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "syncbn"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsCoalescing() const override { return false; }
  void shutdown() override;
  void abort() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  void require_usable() const;
  c10d::Backend& delegate(const at::Tensor& tensor);

  /// Numbers the call, starts it through `start` where `tensor` is, and gives its errors a name.
  template <class Start>
  WorkPtr run(const Call& call, const at::Tensor& tensor, Start&& start);
  /// The same, for what shared memory may know: then `share` starts it.
  template <class Start, class Share>
  WorkPtr run(Call call, const at::Tensor& tensor, Start&& start, Share&& share);
  Label label_of(const Call& call) const;
  template <class Start>
  WorkPtr start_by(c10d::Backend& library, const Call& call, bool by_gloo, Start&& start) const;
  /// For send and recv: ours differ with dtype and length, so that no others match.
  int wire_tag(int tag, const at::Tensor& tensor) const;

  const Delegates delegates_;
  const std::string group_name_;
  std::chrono::milliseconds timeout_;
  const Members members_;
  const std::weak_ptr<PeerMonitor> watch_;
  const bool is_watched_;
  /// Gloo, for as long as this exists. No weak_intrusive_ptr: where that is the last, it destroys,
  /// and on a thread of Gloo's, which callbacks run on, Gloo cannot be destroyed.
  struct GlooHandle {
    std::mutex mutex;
    c10d::Backend* gloo;
  };
  const std::shared_ptr<GlooHandle> handle_;
  InFlightHeaders in_flight_headers_;
  const pid_t process_ = ::getpid();
  std::atomic<bool> shut_down_{false};
  const std::shared_ptr<FlightRecorder> log_;
  std::mutex start_mutex_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> shared_calls_{0};
  uint64_t transfers_ = 0;  ///< sends and recvs, which not all ranks take part in
};

}  // namespace syncbn::dist::detail
