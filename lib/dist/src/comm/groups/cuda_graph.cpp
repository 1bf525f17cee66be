#include <syncbn/dist/cuda_graph.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "groups/cuda_support.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace {

/// Reports each launch to the groups whose calls it has captured, because their timeouts apply to
/// it. After an abort it destroys the graph instead of launching it: NCCL's abort waits until no
/// graph holds calls of the communicator.
class CheckedGraph : public CudaGraph {
 public:
  explicit CheckedGraph(std::unique_ptr<detail::DeviceGraph> graph) : graph_(std::move(graph)) {}

  void capture(const std::function<void()>& work) override {
    // Compares counts of all threads: autograd's threads make some of the calls.
    std::map<c10d::ProcessGroup*, uint64_t> before;
    for (const ProcessGroupPtr& group : detail::living_groups()) {
      before[group.get()] = detail::backend_of(group)->captured();
    }
    graph().capture(work);
    for (const ProcessGroupPtr& group : detail::living_groups()) {
      if (detail::backend_of(group)->captured() == before[group.get()]) continue;
      groups_.emplace_back(group);
    }
  }

  void replay() override {
    try {
      throw_if_aborted();
    } catch (...) {
      graph_.reset();
      throw;
    }
    graph().replay();
    if (groups_.empty()) return;
    const std::function<bool()> has_ended = graph_->end_of_replay();
    for (const auto& weak : groups_) {
      if (const auto group = weak.lock()) detail::backend_of(group)->begin_replay(has_ended);
    }
  }

 private:
  detail::DeviceGraph& graph() const {
    if (graph_ == nullptr) {
      throw base::UserError(
          "a CUDA graph cannot be used again after a group of it failed; make another");
    }
    return *graph_;
  }

  std::unique_ptr<detail::DeviceGraph> graph_;                       ///< null after an abort
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups_;  ///< of captured calls
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
