#pragma once

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group_ptr.h>
#include <syncbn/dist/world_rank.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist {

/// Options of a group over NCCL; the same on all its ranks.
struct NcclOptions {
  /// Calls run on a stream of high priority, ahead of the kernels of other streams.
  bool high_priority = true;
  /// Bounds on the number of thread blocks (CTAs) of a call, from 1: more are faster, and leave
  /// less of the GPU to kernels that run at the same time. Not set: NCCL chooses.
  std::optional<int> min_ctas = std::nullopt;
  std::optional<int> max_ctas = std::nullopt;
  /// NCCL's functions block until they are done. False: libtorch polls.
  bool blocking = true;
  /// DistributedDataParallel's gradient buckets lie in memory that is registered with NCCL, which
  /// then copies less: fewer of the GPU's multiprocessors take part in a call.
  bool register_buckets = false;
};

/// Options of init_process_group().
struct InitOptions {
  /// "gloo", "nccl", "cuda:gloo" (GPUs that several ranks may share), or "auto": NCCL if every rank
  /// has a GPU of its own and the program was built for them, Gloo otherwise. Also PyTorch's
  /// per-device spellings: "cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl" … CPU tensors always use
  /// Gloo. Not case-sensitive.
  std::string backend = "auto";
  /// "env://": RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as syncbn-launch and torchrun set
  /// them. "tcp://host:port": rank 0 listens there; put an IPv6 address in brackets.
  /// "file:///path": a file that all ranks share and the last rank to leave removes; the file of an
  /// earlier job is refused. The latter two take RANK and WORLD_SIZE, or `rank` and `world_size`.
  std::string init_method = "env://";
  /// Timeout of every collective; above zero.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Override RANK and WORLD_SIZE.
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  /// How long to wait for rank 0's store and for all ranks to arrive; above zero.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  /// The network interface by which peers reach this process, such as "eth0"; also sets
  /// NCCL_SOCKET_IFNAME if that is unset. Empty: GLOO_SOCKET_IFNAME, else the one on the route to
  /// rank 0.
  std::string interface = {};
  /// Exchange CPU tensors between ranks of one host through shared memory instead of Gloo
  /// (docs/process_groups.md). False, or SYNCBN_SHARED_MEMORY=0, on one rank turns it off for all
  /// groups of that rank.
  bool shared_memory = true;
  /// For the default group, and for groups that are given none.
  NcclOptions nccl = {};
};

/// Forms the default process group; every rank calls it once. Twin of
/// torch.distributed.init_process_group. Without RANK and WORLD_SIZE in the environment the world
/// has one rank, so that a program also runs without a launcher. Some ranks may run Python's
/// torch.distributed, of the same version and with backend gloo: then new_group() takes sorted
/// ranks, SyncBatchNorm needs a group without them, and a second default group needs new processes
/// (docs/process_groups.md).
/// @throws base::UserError for malformed options or a malformed environment, an unknown interface,
///   when two processes claim one rank or, with backend nccl, one GPU (on every rank that has
///   arrived), or when the default group exists already; base::UnavailableError when rank 0 or a
///   peer does not arrive.
ProcessGroupPtr init_process_group(const InitOptions& options = {});

/// Shuts down the default group and all groups made from it, once their members have connected.
/// Collectives that other ranks still call with this one fail. Without this call a rank leaves when
/// main returns or at exit(); the others treat any other end (_exit, a signal) as a failure. Does
/// nothing without a group.
void destroy_process_group();

/// Throws the error of the collective that failed first if a group of this process was aborted.
/// Collectives that were running on GPUs then end with undefined results: call it after waiting for
/// a GPU and before keeping its results, as in a checkpoint. Later collectives throw by themselves.
/// @throws PeerError, or base::UserError if the ranks made different calls
void throw_if_aborted();

bool is_initialized();

/// @throws base::UserError naming init_process_group when there is no default group.
ProcessGroupPtr default_group();

/// A group over the given ranks of the default group, in the given order. Every rank of the default
/// group calls it, in the same order. Returns null on ranks outside the group; there, functions and
/// options refuse a null group, and {} still stands for the default group.
/// @param timeout of its collectives; not given: the default group's
/// @param nccl not given: the default group's
/// @throws base::UserError for a rank that is outside the world or given twice, or a timeout that
///   is not above zero; base::UnavailableError when a member does not connect.
ProcessGroupPtr new_group(const std::vector<int>& ranks,
                          std::optional<std::chrono::milliseconds> timeout = std::nullopt,
                          const std::optional<NcclOptions>& nccl = std::nullopt);

/// Splits the world into groups of `group_size` consecutive ranks and returns only this rank's,
/// unlike torch.distributed's. Every rank of the default group calls it.
/// @throws base::UserError when the world size is not a multiple of `group_size`.
ProcessGroupPtr new_subgroups(int group_size,
                              std::optional<std::chrono::milliseconds> timeout = std::nullopt);

// {} is the default group.

/// This process's rank in the group.
int rank(const GroupOrDefault& group = {});

/// The number of ranks in the group.
int world_size(const GroupOrDefault& group = {});

/// LOCAL_RANK, or 0 if it is unset.
int local_rank();

/// The device to train on. With backend nccl (given, or chosen by auto) or cuda:gloo: the only GPU
/// that this process sees, or else GPU local_rank(), with cuda:gloo modulo the number of GPUs.
/// Otherwise the CPU.
at::Device device();

}  // namespace syncbn::dist
