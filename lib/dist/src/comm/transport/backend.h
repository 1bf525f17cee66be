#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "monitor/flight_recorder.h"
#include "monitor/peer_monitor.h"
#include "transport/group_abort.h"
#include "transport/polled_work.h"
#include "transport/start_queue.h"
#include "transport/transport.h"

namespace syncbn::dist::detail {

struct Label;

/// A call, and the tensor whose device chooses the transport; undefined: the CPU.
struct PlacedCall {
  Call call;
  at::Tensor tensor;
};

/// The c10d::Backend of every process group of this library. It numbers and records each call,
/// passes it to a Transport, and adds rank, collective, sequence number, group and cause to errors.
/// Registered as CUSTOM, because c10d's Logger casts a backend of type GLOO to ProcessGroupGloo.
class Backend : public c10d::Backend {
 public:
  struct Members {
    int rank = 0;            ///< of this process in the group
    std::vector<int> ranks;  ///< the group's ranks in the world
    int world_size = 1;
  };

  /// @param cuda null without NCCL: `cpu` then carries CUDA tensors as well.
  /// @param monitor null in a world of one, and if some ranks do not run this library.
  Backend(std::shared_ptr<Transport> cpu, std::shared_ptr<Transport> cuda, std::string group_name,
          std::chrono::milliseconds timeout, Members members,
          const std::shared_ptr<PeerMonitor>& monitor);
  ~Backend() override;

  const Members& members() const { return members_; }
  /// The number of collectives started on this rank.
  uint64_t sequence() const { return sequence_; }
  /// Whether a PeerMonitor compares the ranks' calls.
  bool is_monitored() const { return is_monitored_; }
  bool shares_memory() const;
  /// The number of collectives that went through shared memory.
  uint64_t shared_calls() const;
  /// Collectives called on other threads wait until its tasks have run, which keeps the order of
  /// the calls.
  StartQueue& start_queue() { return *start_queue_; }

  /// As Transport::gathers_in_one_hop().
  bool gathers_in_one_hop(const at::Tensor& row) const;
  /// As Transport::gather_in_one_hop(). The fast path of SyncBatchNorm: it bypasses c10d's
  /// dispatcher, so profilers of libtorch do not see it. A CallTrace does.
  /// @param timeout c10d::kUnsetTimeout: the group's.
  void gather_in_one_hop(const at::Tensor& all, std::chrono::milliseconds timeout);

  /// As Transport::runs_on_streams().
  bool runs_on_streams(const at::Tensor& tensor) const {
    return transport_for(tensor).runs_on_streams();
  }

  /// As Transport::allocate_registered().
  void allocate_registered(c10::function_ref<void()> allocate);

  /// As Transport::merge_in_tree(). It also bypasses the dispatcher.
  /// @param timeout c10d::kUnsetTimeout: the group's.
  at::Tensor merge_in_tree(const at::Tensor& row, MergeRows merge,
                           std::chrono::milliseconds timeout);

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// gather_in_one_hop() that does not wait. Ranks may mix both.
  WorkPtr start_gather_in_one_hop(const at::Tensor& all, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return "syncbn"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsCoalescing() const override { return false; }
  void shutdown() override;
  /// @param hook called once, by the first shutdown(), before it closes anything
  void before_shutdown(std::function<void()> hook) { before_shutdown_ = std::move(hook); }
  void abort() override;
  /// @param next the call to make; null: only calls that were made count.
  /// @throws as the call that failed first, if one has failed: results of calls on GPUs are then
  ///   undefined, and other ranks would take the data that `next` sends for a success.
  void require_no_failure(const Call* next = nullptr) const;
  /// Destroys NCCL's communicators, which waits until the other ranks do the same. Stops waiting if
  /// one of them has ended, after an error, and after the group's timeout.
  void close_cuda();

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
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
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
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
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
  /// Ends the threads that wait for calls of this group.
  void stop_threads();
  Transport& transport_for(const at::Tensor& tensor) const;
  Label label_of(const Call& call) const;
  /// The rank in the world of the other end of a transfer. @throws base::UserError if the group has
  /// no such rank: Python passes ranks unchecked.
  int peer_in_world(const char* call, const char* role, int rank) const;
  /// Starts `method` of c10d::Backend on the transport for the call.
  template <class Method, class... Arguments>
  WorkPtr run(PlacedCall placed, Method method, Arguments&... arguments);
  /// Refuses the next all-to-all, before it sends anything. @throws base::UserError.
  [[noreturn]] void refuse_all_to_all(const at::Tensor& input, const std::string& why) const;
  /// Compares what the ranks send and expect in an all-to-all. Blocks. @throws base::UserError if
  /// they differ.
  void require_matching_splits(const at::Tensor& output, const std::vector<int64_t>& output_splits,
                               const at::Tensor& input, const std::vector<int64_t>& input_splits,
                               std::chrono::milliseconds timeout);
  /// Makes a blocking call of a CPU transport.
  /// @param body takes the call, and a function that it calls once the call has started.
  template <class Body>
  void run_blocking(Call call, const Body& body);

  const std::shared_ptr<Transport> cpu_;
  const std::shared_ptr<Transport> cuda_;  ///< may be null
  const std::string group_name_;
  const Members members_;
  const std::weak_ptr<PeerMonitor> monitor_;
  const bool is_monitored_;
  const pid_t process_ = ::getpid();
  std::atomic<bool> shut_down_{false};
  std::function<void()> before_shutdown_;  ///< may be empty
  bool cuda_closed_ = false;
  const std::shared_ptr<GroupAbort> abort_;
  const std::shared_ptr<FlightRecorder> log_;
  const std::shared_ptr<StartQueue> start_queue_ = std::make_shared<StartQueue>();
  const std::shared_ptr<PollingThreads> polling_threads_ = std::make_shared<PollingThreads>();
  bool threads_stopped_ = false;
  std::atomic<std::chrono::milliseconds> timeout_{};
  std::mutex start_mutex_;  ///< calls start one after the other; guards their numbers
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> transfers_{0};  ///< sends and recvs, in which not all ranks take part
};

}  // namespace syncbn::dist::detail
