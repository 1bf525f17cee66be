// Gathers through the memory of GPUs, for libsyncbn_dist_cuda.so.

#include "cuda/peer_gather.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/machine_id.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/peer_gather_launch.h"
#include "transport/pending_row.h"

namespace syncbn::dist::detail {
namespace {

/// Equal on ranks of one host, where a handle names the same memory. NCCL_HOSTID overrides it, as
/// in NCCL.
std::string name_of_host() {
  const auto given = base::env("NCCL_HOSTID");
  return given ? *given : base::machine_id();
}

using Bytes = std::vector<uint8_t>;

/// Publishes `own`, waits for all ranks and returns what each has published.
std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int size,
                                  const std::string& own) {
  store.set(fmt::format("{}/{}", key, rank), Bytes(own.begin(), own.end()));
  std::vector<std::string> all;
  for (int other = 0; other < size; ++other) {
    const Bytes value = store.get(fmt::format("{}/{}", key, other));
    all.emplace_back(value.begin(), value.end());
  }
  return all;
}

/// The error as text; "" for success. Clears the runtime's last error, which a later check would
/// report.
std::string text_of(cudaError_t error) {
  if (error == cudaSuccess) return "";
  static_cast<void>(cudaGetLastError());
  return cudaGetErrorString(error);
}

}  // namespace

bool PeerGatherWork::wait(std::chrono::milliseconds /*timeout*/) {
  end_->block(c10::cuda::getCurrentCUDAStream(end_->device_index()));
  return true;
}

PeerGather::PeerGather(int rank, int size, at::Device device)
    : c10d::Backend(rank, size), device_(device) {
  arguments_.rank = rank;
  arguments_.ranks = size;
}

c10::intrusive_ptr<PeerGather> PeerGather::connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size, at::Device device,
                                                   bool wanted, std::string& why_not) {
  if (size > cuda::kMaxPeers) {
    why_not = fmt::format("the group has more than {} ranks", cuda::kMaxPeers);
    return {};
  }
  const c10::cuda::CUDAGuard guard(device);
  auto made = c10::make_intrusive<PeerGather>(rank, size, device);
  cuda::Mailbox*(&mailboxes)[cuda::kMaxPeers] = made->arguments_.mailboxes;
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(unsigned), cudaHostAllocMapped));
  made->aborted_ = new (memory) unsigned(0);
  made->arguments_.aborted = made->aborted_;
  void* own = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&own, sizeof(cuda::Mailbox)));
  mailboxes[rank] = static_cast<cuda::Mailbox*>(own);
  C10_CUDA_CHECK(cudaMemset(own, 0, sizeof(cuda::Mailbox)));
  C10_CUDA_CHECK(cudaDeviceSynchronize());

  cudaIpcMemHandle_t handle{};
  std::string failure = text_of(cudaIpcGetMemHandle(&handle, own));
  if (!wanted) failure = "peer_memory is off";
  // Users set it on machines where peer memory can be mapped but does not work.
  if (base::env("NCCL_P2P_DISABLE").value_or("0") != "0") failure = "NCCL_P2P_DISABLE is set";
  const std::string host = name_of_host();
  const std::string bytes(reinterpret_cast<const char*>(&handle), sizeof handle);
  const auto offers =
      exchange(*store, "peer_memory", rank, size, failure.empty() ? bytes + host : "");
  for (int peer = 0; peer < size && failure.empty(); ++peer) {
    const std::string& offer = offers[static_cast<size_t>(peer)];
    if (offer.size() < sizeof handle) continue;  // that rank reports why
    if (offer.substr(sizeof handle) != host) {
      failure = fmt::format("rank {} is on another host", peer);
    } else if (peer != rank) {
      std::memcpy(&handle, offer.data(), sizeof handle);
      void* opened = nullptr;
      failure = text_of(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
      mailboxes[peer] = static_cast<cuda::Mailbox*>(opened);
    }
  }
  for (const std::string& one : exchange(*store, "peer_memory_failure", rank, size, failure)) {
    if (!one.empty() && why_not.empty()) why_not = one;
  }
  if (why_not.empty()) return made;
  made->close_to_others();
  exchange(*store, "peer_memory_closed", rank, size, "");
  return {};
}

PeerGather::~PeerGather() {
  // An aborted group keeps its memory until the process ends: freeing it would wait for the device,
  // and other ranks may still use it.
  if (!is_closed_) return;
  const c10::cuda::CUDAGuard guard(device_);
  static_cast<void>(cudaFree(arguments_.mailboxes[arguments_.rank]));
  static_cast<void>(cudaFreeHost(aborted_));
}

c10::intrusive_ptr<c10d::Work> PeerGather::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*options*/) {
  const c10::cuda::CUDAGuard guard(device_);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const bool captures =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  // Two gathers must not overlap. A capture has nothing to wait for: the device is idle when it
  // begins.
  if (last_ && !captures) last_->block(stream);
  cuda::PeerGatherArguments arguments = arguments_;
  arguments.tag = tag_;
  arguments.row = input.const_data_ptr<double>();
  arguments.count = input.numel();
  arguments.rows = output.mutable_data_ptr<double>();
  const bool is_timed = measures_time_ && !captures;
  const auto record_event = [&] {
    auto event =
        std::make_shared<at::cuda::CUDAEvent>(is_timed ? cudaEventDefault : cudaEventDisableTiming);
    event->record(stream);
    return event;
  };
  PeerGatherWork::Event begin = is_timed ? record_event() : nullptr;
  if (!GatherByOwnKernel::launch(arguments, arguments.row)) {
    cuda::launch(arguments, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  PeerGatherWork::Event end = record_event();
  if (!captures) last_ = end;
  return c10::make_intrusive<PeerGatherWork>(std::move(begin), std::move(end));
}

void PeerGather::abort() {
  std::atomic_ref(*aborted_).store(1);
}

void PeerGather::shutdown() {
  const c10::cuda::CUDAGuard guard(device_);
  c10::cuda::device_synchronize();  // replays of graphs may still run
  close_to_others();
}

void PeerGather::close_to_others() {
  const c10::cuda::CUDAGuard guard(device_);
  for (int peer = 0; peer < arguments_.ranks; ++peer) {
    if (peer == arguments_.rank || arguments_.mailboxes[peer] == nullptr) continue;
    static_cast<void>(text_of(cudaIpcCloseMemHandle(arguments_.mailboxes[peer])));
    arguments_.mailboxes[peer] = nullptr;
  }
  is_closed_ = true;
}

}  // namespace syncbn::dist::detail
