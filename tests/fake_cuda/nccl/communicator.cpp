#include "communicator.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <system_error>
#include <utility>

namespace fake_nccl {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kConnectTime{3};
/// How often a waiting rank looks for dead peers, with FAKE_NCCL_DEAD_PEER=remote_error.
constexpr milliseconds kDeathCheckInterval{300};

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Whether a dead peer causes an error, as over sockets; over NVLink and shared memory nothing
/// does.
bool sockets_notice_death() {
  static const bool notice = setting("FAKE_NCCL_DEAD_PEER") == "remote_error";
  return notice;
}

/// Like NCCL's, and different in each network namespace.
uint64_t host_hash() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  const std::string id = setting("NCCL_HOSTID");
  struct stat network {};
  ::stat("/proc/self/ns/net", &network);
  return std::hash<std::string>{}((id.empty() ? name.data() : id) + ":" +
                                  std::to_string(network.st_ino));
}

std::mutex& error_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::array<char, 1024> error_text{};

/// The handles that the user holds. Never destroyed: streams' threads may outlive static objects.
struct Handles {
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<ncclComm>> all;

  static Handles& instance() {
    static auto* const handles = new Handles;
    return *handles;
  }
};

}  // namespace

ncclResult_t fail(ncclResult_t result, const char* format, ...) {
  const std::lock_guard lock(error_mutex());
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_text.data(), error_text.size(), format, arguments);
  va_end(arguments);
  return result;
}

const char* last_error() {
  return error_text.data();
}

}  // namespace fake_nccl

using namespace fake_nccl;

ncclComm::ncclComm(std::string given_name, int given_rank, int given_ranks, int given_device,
                   bool blocks)
    : name(std::move(given_name)),
      rank(given_rank),
      ranks(given_ranks),
      device(given_device),
      is_blocking(blocks) {}

ncclComm::~ncclComm() = default;

std::shared_ptr<ncclComm> ncclComm::find(ncclComm_t handle) {
  Handles& handles = Handles::instance();
  const std::lock_guard lock(handles.mutex);
  const auto found = handles.all.find(handle);
  return found == handles.all.end() ? nullptr : found->second;
}

ncclComm_t ncclComm::publish(const std::shared_ptr<ncclComm>& made) {
  Handles& handles = Handles::instance();
  const std::lock_guard lock(handles.mutex);
  handles.all[made.get()] = made;
  return made.get();
}

ncclResult_t ncclComm::run(std::function<ncclResult_t()> job) {
  const auto run_now = [job = std::move(job)] {
    try {
      return job();
    } catch (const Aborted&) {
      return ncclInternalError;
    } catch (const std::system_error& error) {
      return fail(ncclSystemError, "%s", error.what());
    }
  };
  if (is_blocking) return run_now();
  if (job_.joinable()) job_.join();
  state_ = ncclInProgress;
  job_ = std::thread([this, run_now] {
    cudaSetDevice(device);
    state_ = run_now();
  });
  return ncclInProgress;
}

ncclResult_t ncclComm::state() const {
  if (setting("FAKE_NCCL_ASYNC_ERROR") == "1") {
    return fail(ncclSystemError, "NET/IB: Got completion with error 12 (vendor err 129)");
  }
  const ncclResult_t now = state_;
  return now == ncclSuccess && Clock::now() < connected_at_.load() ? ncclInProgress : now;
}

ncclResult_t ncclComm::connect() {
  if (is_blocking || has_connected_.exchange(true)) return ncclSuccess;
  connected_at_ = Clock::now() + kConnectTime;
  return ncclInProgress;
}

ncclResult_t ncclComm::meet_in_first_call(int kind) {
  if (setting("FAKE_NCCL_RUNTIME_CONNECT") != "1" || ranks == 1) return ncclSuccess;
  const unsigned bit = 1U << kind;
  if ((have_met_.fetch_or(bit) & bit) != 0) return ncclSuccess;
  return run([this] {
    exchange(rank);
    return ncclSuccess;
  });
}

ncclResult_t ncclComm::join() {
  if (const std::string signal = setting("FAKE_NCCL_SIGNAL_AT_SET_UP"); !signal.empty()) {
    ::raise(std::stoi(signal));
  }
  segment_ = std::make_unique<Segment>(name, rank);
  Member& own = shared().members[static_cast<size_t>(rank)];
  own.host = host_hash();
  own.process = ::getpid();
  cudaDeviceGetPCIBusId(own.bus_id.data(), static_cast<int>(own.bus_id.size()), device);
  own.has_joined = true;
  if (shared().joined.fetch_add(1) + 1 == ranks) segment_->remove_name();
  wait([this] { return shared().joined >= ranks; });
  return check_devices();
}

ncclResult_t ncclComm::check_devices() const {
  const auto& members = shared().members;
  for (size_t later = 1; later < static_cast<size_t>(ranks); ++later) {
    for (size_t earlier = 0; earlier < later; ++earlier) {
      if (members[later].host != members[earlier].host ||
          members[later].bus_id != members[earlier].bus_id) {
        continue;
      }
      return fail(ncclInvalidUsage,
                  "Duplicate GPU detected : rank %zu and rank %zu both on CUDA device %s", earlier,
                  later, members[later].bus_id.data());
    }
  }
  return ncclSuccess;
}

bool ncclComm::all(const std::function<bool(int peer)>& condition) const {
  for (int peer = 0; peer < ranks; ++peer) {
    if (!condition(peer)) return false;
  }
  return true;
}

void ncclComm::look_for_dead_peers() {
  if (!segment_ || all([this](int peer) { return !segment_->is_dead(peer); })) return;
  fail(ncclRemoteError, "socketProgress: Connection closed by remote peer");
  ncclResult_t none = ncclSuccess;
  state_.compare_exchange_strong(none, ncclRemoteError);
}

void ncclComm::wait(const std::function<bool()>& is_ready) {
  constexpr int kSpins = 200;
  constexpr int kShortSleeps = 1000;
  Clock::time_point look_at = Clock::now() + kDeathCheckInterval;
  for (int i = 0; !is_ready(); ++i) {
    if (is_aborted_) throw Aborted();
    if (sockets_notice_death() && Clock::now() >= look_at) {
      look_for_dead_peers();
      look_at = Clock::now() + kDeathCheckInterval;
    }
    if (i < kSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(i < kShortSleeps ? 20 : 500));
    }
  }
}

void ncclComm::operate(const std::function<void()>& operation) {
  const std::lock_guard lock(operation_mutex_);
  if (is_aborted_) return;
  try {
    operation();
  } catch (const Aborted&) {  // an abort ends the operation, whatever the buffers contain
  }
}

void ncclComm::leave() {
  if (!segment_) return;
  shared().members[static_cast<size_t>(rank)].has_left = true;
}

ncclResult_t ncclComm::finalize() {
  if (is_finalized_.exchange(true)) {
    return fail(ncclInvalidArgument, "comm %p has already been finalized",
                static_cast<void*>(this));
  }
  return run([this] {
    wait([this] { return operations_.use_count() == 1; });
    leave();
    wait([this] {
      return all([this](int peer) {
        return shared().members[static_cast<size_t>(peer)].has_left ||
               (sockets_notice_death() && segment_->is_dead(peer));
      });
    });
    return ncclSuccess;
  });
}

ncclResult_t ncclComm::destroy() {
  if (!is_finalized_) finalize();
  if (job_.joinable()) job_.join();
  Handles& handles = Handles::instance();
  const std::lock_guard lock(handles.mutex);
  handles.all.erase(this);
  return ncclSuccess;
}

ncclResult_t ncclComm::abort() {
  const std::string manner = setting("FAKE_NCCL_ABORT");
  while (manner == "hang") std::this_thread::sleep_for(std::chrono::seconds(1));
  is_aborted_ = true;
  if (job_.joinable()) job_.join();
  { const std::lock_guard wait_for_the_running_operation(operation_mutex_); }
  if (manner == "device") cudaDeviceSynchronize();
  if (segment_) {
    leave();
    segment_->remove_name();
  }
  Handles& handles = Handles::instance();
  const std::lock_guard lock(handles.mutex);
  handles.all.erase(this);
  return ncclSuccess;
}
