// CUDA graphs, for libsyncbn_dist_cuda.so.

#include "cuda/graph_cuda.h"

#include <exception>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>

namespace syncbn::dist::detail {
namespace {

class Graph : public CudaGraph {
 public:
  void capture(const std::function<void()>& work) override {
    c10::cuda::device_synchronize();
    // Other threads may go on: those of the loader pin memory, NCCL's asks for events.
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

 private:
  /// The stream would stay in capture. Ending it reports the failure again.
  void end_after_failure() {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {
    }
  }

  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<CudaGraph> make_graph() {
  return std::make_unique<Graph>();
}

}  // namespace syncbn::dist::detail
