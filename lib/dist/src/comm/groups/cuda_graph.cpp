#include <syncbn/dist/cuda_graph.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <memory>
#include <utility>

#include "groups/cuda_support.h"

namespace syncbn::dist {
namespace {

/// Launches nothing that uses communicators after their abort, for which NCCL waits until no graph
/// holds their calls.
class CheckedGraph : public CudaGraph {
 public:
  explicit CheckedGraph(std::unique_ptr<CudaGraph> graph) : graph_(std::move(graph)) {}

  void capture(const std::function<void()>& work) override { graph_->capture(work); }
  void replay() override {
    try {
      throw_if_aborted();
    } catch (...) {
      graph_.reset();
      throw;
    }
    graph_->replay();
  }

 private:
  std::unique_ptr<CudaGraph> graph_;  ///< null after an abort
};

}  // namespace

std::unique_ptr<CudaGraph> make_cuda_graph() {
  const detail::CudaSupport* const cuda = detail::cuda_support();
  if (cuda == nullptr) {
    throw base::UserError(
        fmt::format("a CUDA graph needs a GPU: {}", detail::cuda_support_error()));
  }
  return std::make_unique<CheckedGraph>(cuda->make_graph());
}

}  // namespace syncbn::dist
