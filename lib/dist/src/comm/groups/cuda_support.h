#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <syncbn/dist/process_group.h>

#include "transport/transport.h"

namespace syncbn::dist::detail {

/// One rank's part of a group over NCCL.
struct NcclGroup {
  c10::intrusive_ptr<c10d::Store> store;
  std::string name;
  int rank = 0;
  int world_size = 1;
  int world_rank = 0;
  int device = 0;
  std::chrono::milliseconds timeout{};
  /// True: a PeerMonitor aborts the group after a failure or a timeout. False: libtorch's watchdog
  /// ends the process.
  bool is_monitored = false;
  bool measures_time = false;  ///< measure how long calls take on the GPU
  NcclOptions options = {};
  /// A connected group of the same ranks, whose communicator the new one is split from; null: none.
  std::shared_ptr<Transport> parent;
};

/// What process groups need from CUDA and NCCL. This library does not link CUDA;
/// libsyncbn_dist_cuda.so, which is installed beside it, has this table.
struct CudaSupport {
  /// Why CUDA or NCCL does not work here, such as a driver that is too old; empty if both work.
  std::string (*why_unusable)();
  int (*device_count)();
  std::string (*pci_address)(int device);                           ///< "0000:dc:00.0"
  void (*set_device)(int device);                                   ///< for the calling thread
  std::shared_ptr<Transport> (*make_nccl)(const NcclGroup& group);  ///< does not connect yet
};

/// Loads the library once; null when it is not installed or does not load here.
const CudaSupport* cuda_support();

std::string cuda_support_error();

}  // namespace syncbn::dist::detail
