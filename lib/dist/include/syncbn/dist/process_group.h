#pragma once

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group_ptr.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist {

/// How to form the default process group. Twin of torch.distributed.init_process_group.
struct InitOptions {
  /// "gloo", "nccl", or "auto": NCCL when CUDA devices are there and the program was built for
  /// them, Gloo otherwise. Also by device, as in PyTorch: "cpu:gloo", "cuda:nccl",
  /// "cpu:gloo,cuda:nccl". Tensors on the CPU always have Gloo. In any case of letters.
  std::string backend = "auto";
  /// "env://": RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as syncbn-launch and torchrun set
  /// them. "tcp://host:port": rank 0 listens there; an IPv6 address stands in brackets.
  /// "file:///path": a file that all ranks share, and that destroy_process_group() removes with the
  /// last of them; one that an earlier job left is refused. For both, ranks and world size come
  /// from the environment or from below.
  std::string init_method = "env://";
  /// Of every collective, above zero.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Override RANK and WORLD_SIZE.
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  /// How long to wait for the store of rank 0 to answer and all ranks to arrive; above zero.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  /// The network interface by which peers reach this process, such as "eth0". Empty:
  /// GLOO_SOCKET_IFNAME, else the one on the way to rank 0. NCCL is told by NCCL_SOCKET_IFNAME,
  /// unless that is set.
  std::string interface = {};
  /// Whether ranks of one host exchange tensors on the CPU through its memory instead of Gloo
  /// (docs/process_groups.md). SYNCBN_SHARED_MEMORY=0 turns it off, too; one rank that does so does
  /// it for all groups that it is in.
  bool shared_memory = true;
};

/// Forms the default process group; every rank calls it once. Without RANK and WORLD_SIZE in the
/// environment this is a world of one rank, so that a program also runs without a launcher.
/// Some ranks may run Python's torch.distributed, of the same version and with backend gloo: then
/// new_group() takes sorted ranks, SyncBatchNorm needs a group without them, and a second group
/// needs new processes (docs/process_groups.md).
/// @throws base::UserError for malformed options or a malformed environment, an interface that is
///   not there, when two processes claim one rank (all ranks that are there learn of it), or when
///   the default group exists already; base::UnavailableError when rank 0 or a peer does not come.
ProcessGroupPtr init_process_group(const InitOptions& options = {});

/// Shuts the default group and all groups made from it down; what other ranks still call with this
/// one fails. Waits until the members of these groups have connected. Without it a rank leaves
/// where main returns, or at exit(); one that ends in another way (_exit, a signal) has died for
/// the others. Harmless when there is no group.
void destroy_process_group();

bool is_initialized();

/// The default group. @throws base::UserError naming init_process_group when there is none.
ProcessGroupPtr default_group();

/// A group over the given ranks of the default group; every rank of the default group calls it, in
/// the same order. Ranks keep the order given. Null on ranks outside: do not pass that on to the
/// functions below or to options, where an empty group means the default one.
/// @param timeout of its collectives; that of the default group when not given.
/// @throws base::UserError for a rank that is outside the world or given twice, or a timeout that
///   is not above zero; base::UnavailableError when a member does not connect.
ProcessGroupPtr new_group(const std::vector<int>& ranks,
                          std::optional<std::chrono::milliseconds> timeout = std::nullopt);

/// Splits the world into neighbouring groups of `group_size` ranks and returns this rank's. Every
/// rank of the default group calls it. Unlike torch.distributed's it does not return the others'
/// groups.
/// @throws base::UserError when the world's size is not a multiple of it.
ProcessGroupPtr new_subgroups(int group_size,
                              std::optional<std::chrono::milliseconds> timeout = std::nullopt);

/// This process's rank in a group; an empty group means the default one.
int rank(const ProcessGroupPtr& group = {});

/// The number of ranks in a group; an empty group means the default one.
int world_size(const ProcessGroupPtr& group = {});

/// This process's number on its host: LOCAL_RANK, or 0 when unset.
int local_rank();

/// The device that this process trains on: CUDA device local_rank() when the default group's
/// backend is NCCL, the CPU otherwise.
at::Device device();

}  // namespace syncbn::dist
