// Devices and NCCL, for libsyncbn_dist_cuda.so.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <array>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "groups/cuda_support.h"

namespace syncbn::dist::detail {
namespace {

using Event = std::shared_ptr<at::cuda::CUDAEvent>;

/// Whether the device has reached the event. May be called on any thread.
bool has_ended(at::cuda::CUDAEvent& event) {
  // Otherwise the monitor's thread would create a context on GPU 0, which may be another rank's.
  const c10::cuda::CUDAGuard device(event.device_index());
  // Otherwise the query would break the capture of a graph on another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard allowed(cudaStreamCaptureModeThreadLocal);
  return cudaEventQuery(event) == cudaSuccess;
}

/// The events at the begin and the end of a call on its stream. They are shared with the work, so
/// that queries of them need not keep the work and its tensors alive.
struct WorkEvents : c10d::ProcessGroupNCCL::WorkNCCL {
  /// Null unless the group measures time.
  static Event begin_of(const WorkNCCL& work) { return work.*&WorkEvents::ncclStartEvent_; }
  static Event end_of(const WorkNCCL& work) { return work.*&WorkEvents::ncclEndEvent_; }
};

/// A ProcessGroupNCCL that leaves failures to the PeerMonitor. After a failure, libtorch's own
/// watchdog would sleep for a minute and then end the process by SIGABRT, without naming the peer.
class MonitoredNccl : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;

  void leave_failures_to_monitor() {
    asyncErrorHandling_ = c10d::NoHandling;
    heartbeatMonitor_->stop();
  }

  /// Connects as the first collective does. eagerConnectSingleDevice() would also move sends and
  /// recvs, which use a separate communicator for each pair, to the group's stream.
  void connect(at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    // A split may hang while calls of the parent are running.
    if (options_->split_from) c10::cuda::device_synchronize();
    initNCCLComm(std::to_string(device.index()), device, c10d::OpType::ALLREDUCE);
    getCommPtr();  // waits until a non-blocking communicator is ready
  }

  /// @throws c10::DistBackendError with NCCL's message if NCCL's threads have found an error, such
  ///   as a broken connection.
  void throw_asynchronous_error(at::DeviceIndex device) {
    std::shared_ptr<c10d::NCCLComm> communicator = getNCCLComm(std::to_string(device));
    if (!communicator) return;
    if (const auto error = checkForNCCLErrors(communicator)) std::rethrow_exception(error);
  }

  /// Returns the name of the file; empty if libtorch keeps no record.
  std::string write_flight_record(int world_rank) {
    dumpDebuggingInfo(/*includeStackTrace=*/false);
    return traceBufferSize_ > 0 ? c10d::DebugInfoWriter::getWriter(world_rank).getWriterTarget()
                                : "";
  }

 protected:
  void terminateProcess(const std::string& /*message*/) override {}
};

class Nccl : public Transport {
 public:
  Nccl(c10::intrusive_ptr<MonitoredNccl> nccl, const NcclGroup& group)
      : nccl_(std::move(nccl)),
        device_(at::kCUDA, static_cast<at::DeviceIndex>(group.device)),
        registers_buckets_(group.options.register_buckets),
        world_rank_(group.world_rank),
        is_monitored_(group.is_monitored) {}

  const c10::intrusive_ptr<MonitoredNccl>& group() const { return nccl_; }
  c10d::Backend& prepare(const Call& /*call*/) override { return *nccl_; }
  void set_timeout(std::chrono::milliseconds timeout) override {
    if (!is_monitored_) nccl_->setTimeout(timeout);
  }
  void connect() override { nccl_->connect(device_); }
  void shutdown() override { nccl_->shutdown(); }
  bool runs_on_streams() const override { return true; }

  void allocate_registered(c10::function_ref<void()> allocate) override {
    if (!registers_buckets_) return allocate();
    const c10::cuda::CUDAGuard guard(device_);
    if (!pool_) {
      using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;
      // NCCL's own allocator is for GPUs that an NVSwitch connects.
      pool_ = std::make_unique<at::cuda::MemPool>(
          nccl_->supportsTensorAlloc(device_.index())
              ? std::static_pointer_cast<Allocator>(nccl_->getMemAllocator())
              : nullptr);
    }
    struct Allocating {
      at::cuda::MemPool& pool;
      explicit Allocating(at::cuda::MemPool& pool) : pool(pool) {
        c10::cuda::CUDACachingAllocator::beginAllocateToPool(
            pool.device(), pool.id(),
            [thread = std::this_thread::get_id()](cudaStream_t /*stream*/) {
              return std::this_thread::get_id() == thread;
            });
      }
      ~Allocating() {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(pool.device(), pool.id());
      }
    };
    {
      const Allocating in_pool(*pool_);
      allocate();
    }
    nccl_->registerMemPool(pool_.get());
  }

  void abort() override {
    // Never destroyed: the destructor waits for threads that may sleep for a minute after an error.
    static_cast<void>(c10::intrusive_ptr<MonitoredNccl>(nccl_).release());
    write_record();
    nccl_->abort();
  }

  std::function<bool()> completion_of(const c10::intrusive_ptr<c10d::Work>& work) const override {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      return nullptr;
    }
    const auto* const of_nccl = dynamic_cast<const c10d::ProcessGroupNCCL::WorkNCCL*>(work.get());
    if (of_nccl == nullptr) return Transport::completion_of(work);
    return [event = WorkEvents::end_of(*of_nccl), weak = c10::weak_intrusive_ptr(nccl_)] {
      if (has_ended(*event)) return true;
      const auto alive = weak.lock();
      if (alive) alive->throw_asynchronous_error(event->device_index());
      return false;
    };
  }

  std::function<std::chrono::nanoseconds()> time_on_gpu_of(
      const c10::intrusive_ptr<c10d::Work>& work) const override {
    const auto* const of_nccl = dynamic_cast<const c10d::ProcessGroupNCCL::WorkNCCL*>(work.get());
    if (of_nccl == nullptr) return nullptr;
    const Event begin = WorkEvents::begin_of(*of_nccl);
    const Event end = WorkEvents::end_of(*of_nccl);
    if (!begin || !begin->isCreated() || !end->isCreated()) return nullptr;
    return [begin, end] { return time_between(*begin, *end); };
  }

  std::string record_of_calls() const override {
    const std::lock_guard lock(record_mutex_);
    return record_;
  }

 private:
  /// 0 if it cannot be measured.
  static std::chrono::nanoseconds time_between(at::cuda::CUDAEvent& begin,
                                               at::cuda::CUDAEvent& end) {
    const c10::cuda::CUDAGuard device(end.device_index());
    const c10::cuda::CUDAStreamCaptureModeGuard allowed(cudaStreamCaptureModeThreadLocal);
    float milliseconds = 0;
    if (cudaEventElapsedTime(&milliseconds, begin, end) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return {};
    }
    return std::chrono::nanoseconds(static_cast<int64_t>(1e6 * milliseconds));
  }

  /// In a thread with a time limit: its queries may hang after a failure.
  void write_record() {
    std::packaged_task<std::string()> task([nccl = nccl_, device = device_, rank = world_rank_] {
      const c10::cuda::CUDAGuard guard(device);
      return nccl->write_flight_record(rank);
    });
    std::future<std::string> written = task.get_future();
    std::thread(std::move(task)).detach();
    if (written.wait_for(kRecordTime) != std::future_status::ready) return;
    try {
      const std::string file = written.get();
      const std::lock_guard lock(record_mutex_);
      record_ = file;
    } catch (const std::exception&) {  // the error message then names no file
    }
  }

  /// Upper bound on writing the flight record.
  static constexpr std::chrono::milliseconds kRecordTime{500};

  const c10::intrusive_ptr<MonitoredNccl> nccl_;
  const at::Device device_;
  const bool registers_buckets_;
  std::unique_ptr<at::cuda::MemPool> pool_;  ///< of allocate_registered()
  const int world_rank_;
  const bool is_monitored_;
  mutable std::mutex record_mutex_;
  std::string record_;
};

std::shared_ptr<Transport> make_nccl(const NcclGroup& group) {
  // Longer than any call: the PeerMonitor enforces timeouts, not the watchdog.
  constexpr std::chrono::hours kNever{24 * 365};
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = group.is_monitored ? kNever : group.timeout;
  options->group_name = group.name;
  options->is_high_priority_stream = group.options.high_priority;
  if (group.options.min_ctas) options->config.minCTAs = *group.options.min_ctas;
  if (group.options.max_ctas) options->config.maxCTAs = *group.options.max_ctas;
  if (!group.options.blocking) options->config.blocking = 0;
  if (const auto* const parent = dynamic_cast<const Nccl*>(group.parent.get())) {
    options->split_from = parent->group();
    options->split_color = 0;
  }
  auto nccl =
      c10::make_intrusive<MonitoredNccl>(group.store, group.rank, group.world_size, options);
  if (group.is_monitored) nccl->leave_failures_to_monitor();
  if (group.measures_time) nccl->enableCollectivesTiming();
  nccl->setBoundDeviceId(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(group.device)));
  return std::make_shared<Nccl>(std::move(nccl), group);
}

std::string why_unusable() {
  const auto shown = [](int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  };
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess && error != cudaErrorNoDevice) {
    static_cast<void>(cudaGetLastError());  // otherwise a later check would report it
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return fmt::format("CUDA does not start: {} (the driver knows CUDA {}, this program uses {})",
                       cudaGetErrorString(error), shown(driver), shown(CUDART_VERSION));
  }
  // Minor versions are compatible with each other.
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  // The hooks are a stub if libtorch was asked for CUDA before this library was loaded;
  // why_no_gpu() reports that.
  const auto& hooks = at::detail::getCUDAHooks();
  const int of_libtorch =
      hooks.hasCUDART() ? static_cast<int>(hooks.versionCUDART()) : CUDART_VERSION;
  if (runtime / 1000 != CUDART_VERSION / 1000 || of_libtorch / 1000 != CUDART_VERSION / 1000) {
    return fmt::format(
        "versions of CUDA do not fit: this program was built with {}, libtorch with {}, and the "
        "runtime that was loaded is {}; build with headers of libtorch's version, and see "
        "LD_LIBRARY_PATH",
        shown(CUDART_VERSION), shown(of_libtorch), shown(runtime));
  }
  // ProcessGroupNCCL's options hold structures of NCCL by value, so libtorch and this library must
  // be built with the same headers; the loaded NCCL may be newer.
  int library = 0;
  ncclGetVersion(&library);
  const uint64_t of_torch = torch::cuda::nccl::version();
  const uint64_t ours = uint64_t{NCCL_MAJOR} << 32 | uint64_t{NCCL_MINOR} << 16 | NCCL_PATCH;
  if (of_torch >> 16 != ours >> 16 || library < NCCL_VERSION_CODE) {
    return fmt::format(
        "versions of NCCL do not fit: this program was built with {}.{}.{}, libtorch with "
        "{}.{}.{}, "
        "and the library that was loaded is {}.{}.{}; build with the nccl.h of libtorch's version, "
        "and see LD_LIBRARY_PATH",
        NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, of_torch >> 32, of_torch >> 16 & 0xFFFF,
        of_torch & 0xFFFF, library / 10000, library % 10000 / 100, library % 100);
  }
  return "";
}

std::string pci_address(int device) {
  std::array<char, 16> address{};
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), device));
  return address.data();
}

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

constexpr CudaSupport kCudaSupport{why_unusable, device_count, pci_address, set_device, make_nccl};

}  // namespace
}  // namespace syncbn::dist::detail

extern "C" __attribute__((visibility("default"))) const void* syncbn_cuda_support() {
  return &syncbn::dist::detail::kCudaSupport;
}
