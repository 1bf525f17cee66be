// Graphs: capture, instantiation and replay.
//
// A graph is the list of captured operations. Each stream that took part is a lane; an event
// between two streams is a mark that one lane sets and another waits for. A replay enqueues the
// list again: lane 0 on the stream of the launch, the others on the graph's own streams.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime.h"

namespace fake_cuda {
namespace {

struct Operation {
  enum class Kind : uint8_t { kWork, kSet, kWait };
  Kind kind = Kind::kWork;
  size_t lane = 0;
  std::shared_ptr<const Work> work = nullptr;  ///< for kWork
  bool blocks = false;
  size_t mark = 0;  ///< for kSet and kWait
};

struct Graph {
  std::vector<Operation> operations;
  size_t lanes = 1;
  size_t marks = 0;

  size_t nodes() const {
    return static_cast<size_t>(
        std::ranges::count(operations, Operation::Kind::kWork, &Operation::kind));
  }
};

}  // namespace

/// `captures_mutex` guards all members.
class Capture {
 public:
  struct Lane {
    size_t position = 0;                 ///< number of its nodes and waits so far
    std::map<size_t, size_t> seen = {};  ///< by lane: the position for which this lane has waited
  };

  Graph graph;
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool is_invalid = false;
  std::vector<Lane> lanes;
  /// By mark: what the lane that set the mark had seen.
  std::vector<std::map<size_t, size_t>> seen_at_mark;

  size_t add_lane() {
    lanes.emplace_back();
    graph.lanes = lanes.size();
    return lanes.size() - 1;
  }

  /// Whether all captured work happens before the end of lane 0.
  bool is_joined() {
    for (size_t lane = 1; lane < lanes.size(); ++lane) {
      if (lanes[0].seen[lane] < lanes[lane].position) return false;
    }
    return true;
  }
};

namespace {

using CapturePtr = std::shared_ptr<Capture>;

struct Part {
  CapturePtr capture;
  size_t lane = 0;
};

std::mutex captures_mutex;
/// The streams that capture.
std::map<const Stream*, Part>& parts() {
  static auto* const parts = new std::map<const Stream*, Part>;
  return *parts;
}
/// The size of parts(), which is almost always 0: calls then need no lock.
std::atomic<size_t> capturing_streams{0};
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

Part* find_part(const Stream& stream) {
  const auto found = parts().find(&stream);
  return found == parts().end() ? nullptr : &found->second;
}

void add_part(const Stream& stream, Part part) {
  parts().insert_or_assign(&stream, std::move(part));
  capturing_streams = parts().size();
}

void remove_capture(const CapturePtr& capture) {
  std::erase_if(parts(), [&](const auto& item) { return item.second.capture == capture; });
  capturing_streams = parts().size();
}

/// A graph that can be launched, with streams for all lanes but the first.
class ExecutableGraph {
 public:
  ExecutableGraph(Graph graph, int device) : graph_(std::move(graph)) {
    for (size_t lane = 1; lane < graph_.lanes; ++lane) {
      streams_.push_back(std::make_shared<Stream>(device, 0, /*waits_for_legacy=*/false));
    }
  }
  ~ExecutableGraph() {
    for (const StreamPtr& stream : streams_) stream->close();
  }
  ExecutableGraph(const ExecutableGraph&) = delete;
  ExecutableGraph& operator=(const ExecutableGraph&) = delete;

  void launch(const StreamPtr& on) {
    const std::lock_guard lock(mutex_);
    // Launches of one graph do not overlap.
    if (last_launch_) on->wait_for(last_launch_);
    std::vector<StreamPtr> lanes{on};
    lanes.insert(lanes.end(), streams_.begin(), streams_.end());
    const auto start = std::make_shared<Mark>();
    on->set(start);
    for (const StreamPtr& stream : streams_) stream->wait_for(start);
    std::vector<MarkPtr> marks(graph_.marks);
    for (MarkPtr& mark : marks) mark = std::make_shared<Mark>();
    for (const Operation& operation : graph_.operations) {
      Stream& lane = *lanes[operation.lane];
      switch (operation.kind) {
        case Operation::Kind::kWork:
          lane.enqueue([work = operation.work] { (*work)(); }, operation.blocks);
          break;
        case Operation::Kind::kSet:
          lane.set(marks[operation.mark]);
          break;
        case Operation::Kind::kWait:
          lane.wait_for(marks[operation.mark]);
          break;
      }
    }
    last_launch_ = std::make_shared<Mark>();
    on->set(last_launch_);
  }

  /// Takes over the operations of another graph if it has the same shape. @return whether it has
  bool update(const Graph& graph) {
    const std::lock_guard lock(mutex_);
    const auto same_shape = [](const Operation& a, const Operation& b) {
      return a.kind == b.kind && a.lane == b.lane && a.mark == b.mark;
    };
    if (!std::ranges::equal(graph_.operations, graph.operations, same_shape)) return false;
    graph_ = graph;
    return true;
  }

 private:
  std::mutex mutex_;
  Graph graph_;
  std::vector<StreamPtr> streams_;
  MarkPtr last_launch_;
};

Graph& graph_of(cudaGraph_t handle) {
  return *reinterpret_cast<Graph*>(handle);
}

ExecutableGraph& graph_of(cudaGraphExec_t handle) {
  return *reinterpret_cast<ExecutableGraph*>(handle);
}

}  // namespace

bool is_capturing(const Stream& stream) {
  if (capturing_streams == 0) return false;
  const std::lock_guard lock(captures_mutex);
  return find_part(stream) != nullptr;
}

cudaError_t capture_work(const Stream& stream, Work work, bool blocks) {
  const std::lock_guard lock(captures_mutex);
  const Part& part = *find_part(stream);
  if (part.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  part.capture->graph.operations.push_back(
      {.lane = part.lane, .work = std::make_shared<const Work>(std::move(work)), .blocks = blocks});
  ++part.capture->lanes[part.lane].position;
  return cudaSuccess;
}

cudaError_t capture_record(const Stream& stream, CapturedRecord& record) {
  const std::lock_guard lock(captures_mutex);
  const Part& part = *find_part(stream);
  Capture& capture = *part.capture;
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  record = {.capture = part.capture, .mark = capture.graph.marks++};
  capture.graph.operations.push_back(
      {.kind = Operation::Kind::kSet, .lane = part.lane, .mark = record.mark});
  auto seen = capture.lanes[part.lane].seen;
  seen[part.lane] = capture.lanes[part.lane].position;
  capture.seen_at_mark.push_back(std::move(seen));
  return cudaSuccess;
}

cudaError_t capture_wait(const StreamPtr& stream, const CapturedRecord& record) {
  const std::lock_guard lock(captures_mutex);
  const CapturePtr capture = record.capture.lock();
  Part* part = find_part(*stream);
  if (capture == nullptr) {  // that graph is complete
    if (part != nullptr) part->capture->is_invalid = true;
    return part != nullptr ? cudaErrorStreamCaptureIsolation : cudaErrorCapturedEvent;
  }
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (part == nullptr) {
    add_part(*stream, {capture, capture->add_lane()});
    part = find_part(*stream);
  } else if (part->capture != capture) {
    part->capture->is_invalid = capture->is_invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  Capture::Lane& lane = capture->lanes[part->lane];
  capture->graph.operations.push_back(
      {.kind = Operation::Kind::kWait, .lane = part->lane, .mark = record.mark});
  ++lane.position;
  for (const auto& [other, position] : capture->seen_at_mark[record.mark]) {
    lane.seen[other] = std::max(lane.seen[other], position);
  }
  return cudaSuccess;
}

cudaError_t refuse_capture(const Stream& stream) {
  const std::lock_guard lock(captures_mutex);
  if (const Part* part = find_part(stream)) part->capture->is_invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_while_capturing() {
  if (capturing_streams == 0 || mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::lock_guard lock(captures_mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& [stream, part] : parts()) {
    Capture& capture = *part.capture;
    const bool is_own = capture.thread == std::this_thread::get_id();
    const bool forbids = is_own ? capture.mode != cudaStreamCaptureModeRelaxed
                                : capture.mode == cudaStreamCaptureModeGlobal &&
                                      mode_of_thread == cudaStreamCaptureModeGlobal;
    if (!forbids) continue;
    capture.is_invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaError_t refuse_legacy_stream() {
  if (capturing_streams == 0) return cudaSuccess;
  const std::lock_guard lock(captures_mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& [stream, part] : parts()) {
    if (!stream->waits_for_legacy || stream->device != current_device()) continue;
    part.capture->is_invalid = true;
    error = cudaErrorStreamCaptureImplicit;
  }
  return error;
}

void abandon_capture(const Stream& stream) {
  const std::lock_guard lock(captures_mutex);
  if (const Part* part = find_part(stream)) {
    part->capture->is_invalid = true;
    remove_capture(CapturePtr(part->capture));
  }
}

void invalidate(const std::weak_ptr<Capture>& capture) {
  const std::lock_guard lock(captures_mutex);
  if (const CapturePtr active = capture.lock()) active->is_invalid = true;
}

namespace {

cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const StreamPtr stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (is_default(handle)) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(captures_mutex);
  if (find_part(*stream) != nullptr) return cudaErrorIllegalState;
  static unsigned long long captures = 0;
  const auto capture = std::make_shared<Capture>();
  capture->id = ++captures;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  add_part(*stream, {capture, capture->add_lane()});
  return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  const StreamPtr stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  const std::lock_guard lock(captures_mutex);
  const Part* const part = find_part(*stream);
  if (part == nullptr) return cudaErrorIllegalState;
  const CapturePtr capture = part->capture;
  if (part->lane != 0) {
    capture->is_invalid = true;
    return cudaErrorStreamCaptureUnmatched;
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  remove_capture(capture);
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (!capture->is_joined()) return cudaErrorStreamCaptureUnjoined;
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(capture->graph));
  return cudaSuccess;
}

}  // namespace
}  // namespace fake_cuda

using fake_cuda::fail;
using fake_cuda::graph_of;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  FAKE_CUDA_RETURN_ERROR(fake_cuda::begin_capture(stream, mode));
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::end_capture(stream, graph));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  const auto stream = fake_cuda::find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  // The nodes of a graph that is being captured are hidden.
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  const std::lock_guard lock(fake_cuda::captures_mutex);
  const auto* const part = fake_cuda::find_part(*stream);
  if (id != nullptr) *id = part == nullptr ? 0 : part->capture->id;
  *status = part == nullptr             ? cudaStreamCaptureStatusNone
            : part->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake_cuda::mode_of_thread);
  return cudaSuccess;
}

/// Only the number of nodes is implemented.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) return fail(cudaErrorNotSupported);
  *count = graph_of(graph).nodes();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long /*flags*/) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  *executable = reinterpret_cast<cudaGraphExec_t>(
      new fake_cuda::ExecutableGraph(graph_of(graph), fake_cuda::current_device()));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  const auto stream = fake_cuda::find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  // CUDA would capture it as a child graph.
  if (fake_cuda::is_capturing(*stream)) return fail(fake_cuda::refuse_capture(*stream));
  fake_cuda::count(fake_cuda::Count::kGraphs);
  graph_of(executable).launch(stream);
  return cudaSuccess;
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  const bool is_updated = graph_of(executable).update(graph_of(graph));
  *info = {};
  info->result = is_updated ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
  return is_updated ? cudaSuccess : fail(cudaErrorGraphExecUpdateFailure);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete &graph_of(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &graph_of(graph);
  return cudaSuccess;
}

}  // extern "C"
