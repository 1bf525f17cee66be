// CUDA graphs, for libsyncbn_dist_cuda.so.

#include "cuda/graph_cuda.h"

#include <exception>
#include <memory>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/event_query.h"

namespace syncbn::dist::detail {
namespace {

class Graph : public DeviceGraph {
 public:
  void capture(const std::function<void()>& work) override {
    c10::cuda::device_synchronize();
    // Thread-local, because other threads make CUDA calls: the loader's pin memory, NCCL's query
    // events.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      end_after_failure();
      throw;
    }
    graph_.capture_end();
  }

  void replay() override { graph_.replay(); }

  std::function<bool()> end_of_replay() override {
    auto end = std::make_shared<at::cuda::CUDAEvent>();
    end->record(c10::cuda::getCurrentCUDAStream());
    return [end] { return has_ended(*end); };
  }

 private:
  /// Without this the stream would stay in capture mode. Ending the capture reports the failure
  /// again.
  void end_after_failure() {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {
    }
  }

  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<DeviceGraph> make_graph() {
  return std::make_unique<Graph>();
}

}  // namespace syncbn::dist::detail
