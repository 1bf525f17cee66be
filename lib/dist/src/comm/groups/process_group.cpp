#include <syncbn/dist/process_group.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/plain_message.h>
#include <syncbn/dist/world_rank.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <thread>

#include <c10/util/Logging.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "groups/cuda_support.h"
#include "groups/own_gpu.h"
#include "groups/world.h"
#include "monitor/nccl_misuse.h"
#include "rendezvous/group_store.h"
#include "rendezvous/interfaces.h"
#include "rendezvous/rendezvous.h"
#include "transport/gloo.h"
#include "transport/handshake.h"
#include "transport/timeouts.h"
#include "transport/wait_while.h"

C10_DECLARE_int(caffe2_log_level);

namespace syncbn::dist {
namespace detail {
namespace {

struct MadeGroup {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::vector<int> ranks;
  bool all_ours = true;
};

/// What init_process_group() makes and destroy_process_group() destroys.
struct World {
  Rendezvous place;
  std::chrono::milliseconds timeout;
  std::chrono::milliseconds connect_timeout;
  at::Device device = at::kCPU;
  bool shared_memory = true;
  bool needs_shared_memory = false;
  NcclOptions nccl;
  pid_t process = ::getpid();
  bool made_by_python = false;
  int groups_made = 0;
  bool has_returned_null_group = false;  ///< new_group() has returned null
  std::shared_ptr<PeerMonitor> monitor;  ///< null in a world of one, and with Python ranks
  std::vector<MadeGroup> made;
  ProcessGroupPtr group;
  std::shared_ptr<Transport> connected_nccl;      ///< of `group`; null: none, or not connected yet
  std::map<std::string, ProcessGroupPtr> joined;  ///< of join_group(), by name
  ProcessGroupPtr statistics;                     ///< made at first use
  std::map<int, ProcessGroupPtr> statistics_subgroups;  ///< the same, by size
};

// Never destroyed: at exit, libtorch's statics may already be gone.
std::unique_ptr<World>& world() {
  static auto* const instance = new std::unique_ptr<World>();
  return *instance;
}

World& require_world() {
  if (!world()) {
    throw base::UserError(
        "there is no process group: call syncbn::dist::init_process_group() first");
  }
  return *world();
}

int count_ours(const World& world, const std::vector<int>& ranks) {
  return static_cast<int>(std::count_if(ranks.begin(), ranks.end(), [&](int rank) {
    return world.place.python_ranks.count(rank) == 0;
  }));
}

/// Describes one of the ranks that has ended, or ends within `patience`; otherwise empty.
std::string end_of_member(const World& world, const std::vector<int>& ranks,
                          std::chrono::milliseconds patience) {
  if (!world.monitor) {
    std::this_thread::sleep_for(patience);
    return "";
  }
  const std::string end = world.monitor->end_among(ranks, patience);
  return end.empty() ? end : end + ". That rank's own message, if any, says why";
}

/// Interval between queries to the store, which does not notice when ranks end.
constexpr std::chrono::milliseconds kPollInterval{5};

/// Bounds Transport::connect(), which waits without a limit. After a failure, the thread that runs
/// connect() may never end.
void connect_within(std::chrono::milliseconds limit, const World& world,
                    const std::vector<int>& ranks, const std::shared_ptr<Transport>& transport) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const bool connected = wait_while([transport] { transport->connect(); }, kPollInterval,
                                    [&] {
                                      const std::string end = world.monitor->end_among(
                                          ranks, std::chrono::milliseconds(0));
                                      if (!end.empty()) throw std::runtime_error(end);
                                      return std::chrono::steady_clock::now() < deadline;
                                    });
  if (connected) return;
  throw std::runtime_error(
      fmt::format("NCCL has not connected within {} ms: a rank is stopped, or the network between "
                  "GPUs does not work (NCCL_DEBUG=INFO says more)",
                  limit.count()));
}

/// Why connecting failed, with advice if file descriptors have run out or no network interface is
/// up: for these, Gloo and libtorch only name a line of their sources.
std::string reason_of(const std::exception& error) {
  const std::string text = plain_message(error);
  for (const int refused : {ENFILE, EMFILE}) {  // the text of ENFILE contains that of EMFILE
    if (text.find(std::strerror(refused)) != text.npos) return base::describe_errno(refused);
  }
  const bool lacks_interface = text.find("Unable to find interface") != text.npos;
  return lacks_interface ? text + base::limit_advice(ENETUNREACH) : text;
}

ProcessGroupPtr make_group(World& world, const std::vector<int>& ranks, int rank,
                           const std::string& name, std::chrono::milliseconds timeout,
                           const NcclOptions& nccl) {
  const int size = static_cast<int>(ranks.size());
  const auto store = group_store(world.place.store, name);
  const bool all_ours = count_ours(world, ranks) == size;
  std::shared_ptr<Transport> cpu;
  std::shared_ptr<Transport> cuda;
  try {
    // Shared memory needs the monitor to detect dead peers; with Python ranks there is none.
    std::optional<shm::Handshake> handshake;
    if (world.monitor && world.shared_memory && size > 1) {
      handshake = shm::Handshake::start(*store, rank, size);
    }
    const auto connect = [&](const char* part, int own, int count) {
      return std::make_shared<Gloo>(store_part(store, part), own, count, world.place.addresses,
                                    std::min(timeout, world.connect_timeout), all_ours);
    };
    const std::shared_ptr<Gloo> gloo = connect("cpu", rank, size);
    cpu = gloo;
    if (handshake && handshake->is_started_by_all(*store)) {
      cpu = std::move(*handshake).finish(gloo, ranks, [&](int host, int hosts) {
        return connect("hosts", host, hosts);
      });
    }
    if (world.needs_shared_memory && cpu == gloo && name == kDefaultGroupName) {
      throw base::UserError(
          "SYNCBN_SHARED_MEMORY=1, and the ranks of this host do not share memory: one of them has "
          "none to allocate, runs Python's torch.distributed or does not see the processes of the "
          "others; unset the variable to let them use Gloo");
    }
    if (world.place.choice.backend == "nccl") {
      const auto record = base::FlightRecord::of_process(world.place.rank, world.place.world_size);
      if (record) record->set_gpu(cuda_support()->pci_address(world.device.index()));
      cuda = cuda_support()->make_nccl(
          {.store = store_part(store, "cuda"),
           .name = name,
           .rank = rank,
           .world_size = size,
           .world_rank = world.place.rank,
           .device = world.device.index(),
           .timeout = timeout,
           .is_monitored = world.monitor && all_ours,
           .measures_time = record != nullptr,
           .options = nccl,
           .parent = size == world.place.world_size ? world.connected_nccl : nullptr});
      PeerMonitor::skip_destructors_after_failure();
      // Python ranks connect in their first collective.
      if (world.monitor && all_ours) {
        connect_within(std::min(timeout, world.connect_timeout), world, ranks, cuda);
        if (name == kDefaultGroupName) world.connected_nccl = cuda;
      }
    }
  } catch (const base::Error&) {
    throw;
  } catch (const std::exception& error) {
    std::string why = reason_of(error);
    if (is_misuse_of_nccl(error)) {
      throw base::UserError(
          fmt::format("rank {} of {} on {}: NCCL refuses the ranks of group '{}': {}",
                      world.place.rank, world.place.world_size, base::hostname(), name, why));
    }
    const std::string end = end_of_member(world, ranks, std::chrono::seconds(1));
    if (!end.empty()) why = end;
    throw base::UnavailableError(
        fmt::format("rank {} of {} on {}: connecting the {} ranks of group '{}' failed: {}",
                    world.place.rank, world.place.world_size, base::hostname(), size, name, why));
  }
  auto backend = c10::make_intrusive<Backend>(std::move(cpu), std::move(cuda), name, timeout,
                                              Backend::Members{rank, ranks, world.place.world_size},
                                              world.monitor);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  constexpr auto kType = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(c10::DeviceType::CPU, kType, backend);
  group->setBackend(c10::DeviceType::CUDA, kType, backend);
  group->setDefaultBackend(kType);
  group->setGroupName(name);
  world.made.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), ranks, all_ours});
  return group;
}

/// Checks that every rank of the world calls new_group() with the same list. Otherwise ranks would
/// wait in the store, which does not notice when ranks die.
void agree_on_members(const World& world, const std::vector<int>& ranks) {
  if (world.place.world_size == 1 || !world.place.python_ranks.empty()) return;
  const auto text = [](const std::vector<int>& list) {
    return fmt::format("{}", fmt::join(list, ","));
  };
  const std::vector<std::string> all = all_gather_bytes(text(ranks), world.group);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw base::UserError(fmt::format(
        "new_group: rank 0 gives the ranks {{{}}}, rank {} gives {{{}}}; every rank calls it with "
        "the same ones in the same order",
        all[0], rank, all[rank]));
  }
}

/// Every member calls it, in the same order. Null on ranks that are not members.
ProcessGroupPtr form_group(World& world, const std::string& name, const std::vector<int>& ranks,
                           std::chrono::milliseconds timeout, const NcclOptions& nccl) {
  const auto self = std::find(ranks.begin(), ranks.end(), world.place.rank);
  const bool member = self != ranks.end();
  ProcessGroupPtr group;
  if (member) {
    group = make_group(world, ranks, static_cast<int>(self - ranks.begin()), name, timeout, nccl);
  }
  leave_rendezvous(world.place, name, count_ours(world, ranks), member, world.connect_timeout,
                   [&] { return end_of_member(world, ranks, kPollInterval); });
  return group;
}

/// Every rank of the world calls it, in the same order. Null on ranks that are not members.
ProcessGroupPtr form_group(World& world, const std::vector<int>& ranks,
                           std::chrono::milliseconds timeout, const NcclOptions& nccl) {
  return form_group(world, std::to_string(world.groups_made++), ranks, timeout, nccl);
}

/// Waits until the other ranks have formed this rank's groups.
void let_peers_connect(const World& world) {
  // An exception must be reported without delay.
  if (std::uncaught_exceptions() > 0) return;
  for (const MadeGroup& made : world.made) {
    const auto group = made.group.lock();
    if (!group) continue;
    const bool store_answers =
        wait_for_members(world.place, group->getGroupName(), world.connect_timeout,
                         [&] { return end_of_member(world, made.ranks, kPollInterval); });
    if (!store_answers) return;
  }
}

/// The groups that still exist.
std::vector<ProcessGroupPtr> groups_of(const World& world) {
  std::vector<ProcessGroupPtr> groups;
  for (const MadeGroup& made : world.made) {
    if (auto group = made.group.lock()) groups.push_back(std::move(group));
  }
  return groups;
}

/// Tells the other ranks that this one leaves, and closes NCCL. Called while the monitor still
/// reports which ranks have ended.
void close_nccl(const World& world) {
  if (world.place.choice.backend != "nccl") return;
  if (world.monitor) world.monitor->announce_leave();
  for (const ProcessGroupPtr& group : groups_of(world)) backend_of(group)->close_cuda();
}

void check(const NcclOptions& nccl) {
  const int least = nccl.min_ctas.value_or(1);
  if (least >= 1 && nccl.max_ctas.value_or(least) >= least) return;
  throw base::UserError(fmt::format(
      "NcclOptions: min_ctas is {} and max_ctas {}; they are at least 1, and max_ctas at least "
      "min_ctas",
      least, nccl.max_ctas.value_or(least)));
}

std::vector<int> consecutive_ranks(int first, int count) {
  std::vector<int> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

/// Checks the ranks and forms the group. Unlike new_group(), does not record a null result:
/// new_subgroups() and statistics_group() never hand one out.
ProcessGroupPtr form_checked_group(const std::vector<int>& ranks,
                                   std::optional<std::chrono::milliseconds> timeout,
                                   const std::optional<NcclOptions>& nccl = std::nullopt) {
  World& world = require_world();
  if (timeout) timeout = checked(*timeout, "new_group: the timeout");
  if (nccl) check(*nccl);
  const int size = world.place.world_size;
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size) {
      throw base::UserError(fmt::format("new_group: rank {} is outside the world of {}", rank,
                                        base::counted(size, "rank")));
    }
    if (!seen.insert(rank).second) {
      throw base::UserError(fmt::format("new_group: rank {} is given twice", rank));
    }
  }
  if (ranks.empty()) throw base::UserError("new_group: no ranks are given");
  if (!world.place.python_ranks.empty() && !std::is_sorted(ranks.begin(), ranks.end())) {
    throw base::UserError(
        "new_group: in a job with ranks of Python's torch.distributed, which sorts them, the ranks "
        "must be given in ascending order");
  }
  agree_on_members(world, ranks);
  return form_group(world, ranks, timeout.value_or(world.timeout), nccl.value_or(world.nccl));
}

}  // namespace

Backend* backend_of(const ProcessGroupPtr& group) {
  if (group->getBackendType() != c10d::ProcessGroup::BackendType::CUSTOM) return nullptr;
  return dynamic_cast<Backend*>(group->getDefaultBackend().get());
}

std::vector<ProcessGroupPtr> living_groups() {
  return world() ? groups_of(*world()) : std::vector<ProcessGroupPtr>();
}

int world_rank(const ProcessGroupPtr& group, int64_t rank) {
  const Backend* const backend = backend_of(group);
  return backend != nullptr ? backend->members().ranks.at(static_cast<size_t>(rank))
                            : static_cast<int>(rank);
}

bool all_ranks_are_ours(const ProcessGroupPtr& group) {
  if (!world() || world()->place.python_ranks.empty()) return true;
  const auto& asked = group ? group : world()->group;
  const auto& made = world()->made;
  const auto found = std::find_if(made.begin(), made.end(),
                                  [&](const MadeGroup& one) { return one.group.lock() == asked; });
  return found != made.end() && found->all_ours;
}

ProcessGroupPtr statistics_group(const ProcessGroupPtr& group) {
  if (!all_ranks_are_ours(group)) {
    throw base::UserError(fmt::format(
        "SyncBatchNorm: rank {} runs Python's torch.distributed, whose SyncBatchNorm exchanges its "
        "statistics in another way; pass it a process_group of C++ ranks alone, or use batch "
        "normalisation that is not synchronised",
        *world()->place.python_ranks.begin()));
  }
  if (group) return group;
  if (!world()) {
    const auto size = base::env_int("WORLD_SIZE", 1, 1 << 20);
    if (!size || *size == 1) return nullptr;
    throw base::UserError(fmt::format(
        "SyncBatchNorm is training with WORLD_SIZE={} and no process group: its "
        "statistics would be this rank's alone; call syncbn::dist::init_process_group() first",
        *size));
  }
  World& it = *world();
  if (it.place.world_size == 1) return nullptr;
  if (!it.statistics)
    it.statistics = form_checked_group(consecutive_ranks(0, it.place.world_size), std::nullopt);
  return it.statistics;
}

ProcessGroupPtr statistics_subgroup(int group_size) {
  if (!world() || !all_ranks_are_ours({})) return statistics_group({});
  const int size = world()->place.world_size;
  if (group_size < 1 || size % group_size != 0) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: group_size is {}, and {} cannot be split into groups of "
                    "as many neighbours; it must divide the number of ranks",
                    group_size, base::counted(size, "rank")));
  }
  if (group_size == size) return statistics_group({});
  ProcessGroupPtr& group = world()->statistics_subgroups[group_size];
  if (!group) group = new_subgroups(group_size);
  return group;
}

}  // namespace detail

using detail::require_world;

namespace {

/// The name under which lib/data finds the default group.
constexpr const char* kRegisteredAs = "syncbn";

ProcessGroupPtr form_world(const InitOptions& given,
                           const c10::intrusive_ptr<c10d::Store>& opened = nullptr,
                           std::optional<int> gpu_index = std::nullopt) {
  if (detail::world()) {
    throw base::UserError(
        "init_process_group was called twice; call destroy_process_group() in between");
  }
  InitOptions options = given;
  options.timeout = detail::checked(given.timeout, "InitOptions::timeout");
  options.connect_timeout = detail::checked(given.connect_timeout, "InitOptions::connect_timeout");
  detail::check(options.nccl);
  // Otherwise c10d logs a page of stack frames for each lost connection.
  if (!base::env("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  auto made = std::make_unique<detail::World>();
  const detail::OwnGpu gpu = detail::find_own_gpu(options.backend, gpu_index);
  const auto shared_memory = base::env_int("SYNCBN_SHARED_MEMORY", 0, 1);
  made->shared_memory = options.shared_memory && shared_memory.value_or(1) == 1;
  made->needs_shared_memory = options.shared_memory && shared_memory == 1 &&
                              base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20).value_or(1) > 1;
  made->timeout = options.timeout;
  made->nccl = options.nccl;
  made->place = detail::rendezvous(options, gpu.offer, opened);
  const detail::BackendChoice& choice = made->place.choice;
  if (!choice.message.empty()) spdlog::warn("{}", choice.message);
  if (choice.backend != "gloo") {
    // libtorch's watchdog and monitor only repeat what this library's messages say better.
    if (!base::env("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
    detail::set_nccl_environment(options.interface);
    detail::cuda_support()->set_device(gpu.index);
    made->device = {at::kCUDA, static_cast<at::DeviceIndex>(gpu.index)};
  }
  made->connect_timeout = options.connect_timeout;
  if (made->place.world_size > 1 && made->place.python_ranks.empty()) {
    made->monitor =
        detail::PeerMonitor::join(*made->place.store, made->place.rank, made->place.world_size,
                                  made->place.addresses.front(), options.connect_timeout);
  }
  made->group = detail::form_group(*made, detail::consecutive_ranks(0, made->place.world_size),
                                   options.timeout, options.nccl);
  c10d::register_process_group(kRegisteredAs, made->group);
  detail::world() = std::move(made);
  return detail::world()->group;
}

}  // namespace

ProcessGroupPtr init_process_group(const InitOptions& options) {
  return form_world(options);
}

ProcessGroupPtr detail::init_process_group(const c10::intrusive_ptr<c10d::Store>& opened,
                                           const InitOptions& options, std::optional<int> gpu) {
  // Python has destroyed its default group if it forms another one, but may not have told this
  // library: its wrapper for debugging does not pass shutdown() on, and neither does a failed init.
  if (world() && world()->made_by_python) destroy_process_group();
  ProcessGroupPtr group = form_world(options, opened, gpu);
  world()->made_by_python = true;
  backend_of(group)->before_shutdown(destroy_process_group);
  return group;
}

ProcessGroupPtr detail::join_group(const std::string& name, const std::vector<int>& ranks,
                                   std::chrono::milliseconds timeout) {
  World& world = require_world();
  timeout = checked(timeout, "new_group: the timeout");
  ProcessGroupPtr group = form_group(world, name, ranks, timeout, world.nccl);
  backend_of(group)->before_shutdown([name] {
    if (detail::world()) detail::world()->joined.erase(name);
  });
  return world.joined[name] = group;
}

void destroy_process_group() {
  if (!detail::world()) return;
  if (detail::world()->process != ::getpid()) {
    // A forked process must not touch the parent's connections and threads.
    static_cast<void>(detail::world().release());
    c10d::unregister_process_group(kRegisteredAs);
    return;
  }
  // shutdown() of a group that Python made calls this function again, which then returns at once.
  const std::unique_ptr<detail::World> world = std::move(detail::world());
  c10d::unregister_process_group(kRegisteredAs);
  detail::let_peers_connect(*world);
  detail::close_nccl(*world);
  // First, so that ranks that still wait for this one learn why they lose their connections.
  world->monitor.reset();
  // The user's modules and graphs may keep groups alive, but connections end here.
  for (const ProcessGroupPtr& group : detail::groups_of(*world)) group->shutdown();
}

void throw_if_aborted() {
  for (const ProcessGroupPtr& group : detail::living_groups()) {
    detail::backend_of(group)->require_no_failure();
  }
}

bool is_initialized() {
  return detail::world() != nullptr;
}

ProcessGroupPtr default_group() {
  return require_world().group;
}

ProcessGroupPtr new_group(const std::vector<int>& ranks,
                          std::optional<std::chrono::milliseconds> timeout,
                          const std::optional<NcclOptions>& nccl) {
  ProcessGroupPtr group = detail::form_checked_group(ranks, timeout, nccl);
  if (!group) detail::world()->has_returned_null_group = true;
  return group;
}

ProcessGroupPtr new_subgroups(int group_size, std::optional<std::chrono::milliseconds> timeout) {
  const int size = world_size();
  if (group_size < 1 || size % group_size != 0) {
    throw base::UserError(
        fmt::format("new_subgroups: the world of {} cannot be split into groups of {}",
                    base::counted(size, "rank"), group_size));
  }
  ProcessGroupPtr own;
  for (int first = 0; first < size; first += group_size) {
    const auto ranks = detail::consecutive_ranks(first, group_size);
    if (auto group = detail::form_checked_group(ranks, timeout)) own = group;
  }
  return own;
}

GroupOrDefault::GroupOrDefault(ProcessGroupPtr group) : given_(std::move(group)) {
  if (given_ || detail::world() == nullptr || !detail::world()->has_returned_null_group) return;
  throw base::UserError(
      "the process group is null on this rank, because new_group() was called without it; skip the "
      "call on this rank, or pass {} for the default group");
}

ProcessGroupPtr GroupOrDefault::get() const {
  return given_ ? given_ : default_group();
}

int rank(const GroupOrDefault& group) {
  return group.get()->getRank();
}

int world_size(const GroupOrDefault& group) {
  return group.get()->getSize();
}

int get_group_rank(const GroupOrDefault& group, int global_rank) {
  const ProcessGroupPtr asked = group.get();
  for (int rank = 0; rank < asked->getSize(); ++rank) {
    if (detail::world_rank(asked, rank) == global_rank) return rank;
  }
  throw base::UserError(fmt::format("rank {} of the world is not in group '{}', which has {}",
                                    global_rank, asked->getGroupName(),
                                    base::counted(asked->getSize(), "rank")));
}

int get_global_rank(const GroupOrDefault& group, int group_rank) {
  const ProcessGroupPtr asked = group.get();
  if (group_rank >= 0 && group_rank < asked->getSize()) {
    return detail::world_rank(asked, group_rank);
  }
  throw base::UserError(fmt::format("group '{}' has {}, and no rank {}", asked->getGroupName(),
                                    base::counted(asked->getSize(), "rank"), group_rank));
}

int local_rank() {
  return static_cast<int>(base::env_int("LOCAL_RANK", 0, 1 << 20).value_or(0));
}

at::Device device() {
  return require_world().device;
}

}  // namespace syncbn::dist
