// Graphs: what a capture records and a replay runs, and what a capture refuses.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "fake_cuda.h"
#include "support/eventually.h"
#include "test/on_gpu.h"

namespace {

using fake_cuda::Count;
using fake_cuda::kOnGpu;
using fake_cuda::lag;

cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
  return stream;
}

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  return event;
}

cudaGraphExec_t instantiate(cudaGraph_t graph) {
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(cudaGraphInstantiateWithFlags(&executable, graph, 0), cudaSuccess);
  return executable;
}

/// A capture on a new stream, from construction to end().
class Recording {
 public:
  explicit Recording(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal,
                     unsigned flags = cudaStreamNonBlocking)
      : stream(new_stream(flags)) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
  }
  cudaGraph_t end(cudaError_t expected = cudaSuccess) const {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), expected);
    EXPECT_EQ(graph == nullptr, expected != cudaSuccess);
    return graph;
  }
  /// Checks that the capture is invalid, and ends it.
  void expect_invalid() const {
    cudaStreamCaptureStatus status{};
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(fake_cuda::enqueue(stream, [] {}), cudaErrorStreamCaptureInvalidated);
    end(cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  }
  void enqueue(fake_cuda::Work work) const {
    EXPECT_EQ(fake_cuda::enqueue(stream, std::move(work)), cudaSuccess);
  }

  const cudaStream_t stream;
};

TEST(FakeGraphsTest, RunAtEachReplayAndNotWhileTheyAreCaptured) {
  int runs = 0;
  const Recording recording;
  recording.enqueue([&runs] { ++runs; });
  recording.enqueue([&runs] { runs *= 2; });
  cudaGraph_t graph = recording.end();
  size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  EXPECT_EQ(nodes, 2U);
  EXPECT_EQ(runs, 0);
  cudaGraphExec_t executable = instantiate(graph);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  const auto before = fake_cuda::counts();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(cudaGraphLaunch(executable, recording.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(recording.stream), cudaSuccess);
  EXPECT_EQ((fake_cuda::counts() - before)[Count::kGraphs], 3U);
  EXPECT_EQ(runs, 14);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

// The branch waits for work that runs beside it; work after the join sees that the branch has run.
TEST(FakeGraphsTest, BranchesRunBesideEachOtherAndJoin) {
  std::atomic<int> branch{0};
  std::atomic<int> seen{0};
  std::atomic<bool> has_begun{false};
  const Recording recording;
  cudaStream_t side = new_stream();
  cudaEvent_t fork = new_event();
  cudaEvent_t join = new_event();
  EXPECT_EQ(cudaEventRecord(fork, recording.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(side, fork, 0), cudaSuccess);
  const auto slow = [&] {
    EXPECT_TRUE(syncbn::test::eventually([&] { return has_begun.load(); }));
    ++branch;
  };
  EXPECT_EQ(fake_cuda::enqueue(side, slow, /*blocks=*/true), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(join, side), cudaSuccess);
  recording.enqueue([&] { has_begun = true; });
  EXPECT_EQ(cudaStreamWaitEvent(recording.stream, join, 0), cudaSuccess);
  recording.enqueue([&] { seen = branch.load(); });
  cudaGraphExec_t executable = instantiate(recording.end());
  EXPECT_EQ(cudaEventQuery(join), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaGraphLaunch(executable, recording.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(recording.stream), cudaSuccess);
  EXPECT_EQ(seen, 1);
}

TEST(FakeGraphsTest, AnUpdateTakesTheSameShapeOnly) {
  int value = 0;
  const auto record = [&](int add, int times) {
    const Recording recording;
    for (int i = 0; i < times; ++i) recording.enqueue([&value, add] { value += add; });
    return recording.end();
  };
  cudaGraphExec_t executable = instantiate(record(1, 2));
  cudaGraphExecUpdateResultInfo info{};
  EXPECT_EQ(cudaGraphExecUpdate(executable, record(10, 2), &info), cudaSuccess);
  EXPECT_EQ(cudaGraphExecUpdate(executable, record(100, 3), &info),
            cudaErrorGraphExecUpdateFailure);
  EXPECT_EQ(info.result, cudaGraphExecUpdateErrorTopologyChanged);
  EXPECT_EQ(cudaGraphLaunch(executable, new_stream()), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(value, 20);
}

struct Refusal {
  const char* name;
  cudaError_t error;
  std::function<cudaError_t(cudaStream_t capturing)> call;
};

TEST(FakeGraphsTest, RefuseWhatNeedsTheHostOrOtherWork) {
  void* const memory = [] {
    void* pointer = nullptr;
    EXPECT_EQ(cudaMalloc(&pointer, 64), cudaSuccess);
    return pointer;
  }();
  cudaEvent_t event = new_event();  // recorded outside of the capture
  EXPECT_EQ(cudaEventRecord(event, new_stream()), cudaSuccess);
  static float pageable[4] = {};
  const std::vector<Refusal> refusals{
      {"synchronise", cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize},
      {"query", cudaErrorStreamCaptureUnsupported, cudaStreamQuery},
      {"synchronise the device", cudaErrorStreamCaptureUnsupported,
       [](cudaStream_t) { return cudaDeviceSynchronize(); }},
      {"allocate", cudaErrorStreamCaptureUnsupported,
       [](cudaStream_t) {
         void* pointer = nullptr;
         return cudaMalloc(&pointer, 64);
       }},
      {"free", cudaErrorStreamCaptureUnsupported, [=](cudaStream_t) { return cudaFree(memory); }},
      {"pin", cudaErrorStreamCaptureUnsupported,
       [](cudaStream_t) { return cudaHostRegister(pageable, sizeof pageable, 0); }},
      {"copy and wait", cudaErrorStreamCaptureUnsupported,
       [=](cudaStream_t) { return cudaMemcpy(pageable, memory, 4, cudaMemcpyDefault); }},
      {"copy to pageable memory", cudaErrorStreamCaptureUnsupported,
       [=](cudaStream_t capturing) {
         return cudaMemcpyAsync(pageable, memory, 4, cudaMemcpyDefault, capturing);
       }},
      {"query an event", cudaErrorStreamCaptureUnsupported,
       [=](cudaStream_t) { return cudaEventQuery(event); }},
      {"wait for an event of outside", cudaErrorStreamCaptureIsolation,
       [=](cudaStream_t capturing) { return cudaStreamWaitEvent(capturing, event, 0); }},
      {"query a captured event", cudaErrorCapturedEvent,
       [](cudaStream_t capturing) {
         cudaEvent_t captured = new_event();
         EXPECT_EQ(cudaEventRecord(captured, capturing), cudaSuccess);
         return cudaEventQuery(captured);
       }},
      {"wait for a captured event", cudaErrorCapturedEvent,
       [](cudaStream_t capturing) {
         cudaEvent_t captured = new_event();
         EXPECT_EQ(cudaEventRecord(captured, capturing), cudaSuccess);
         return cudaEventSynchronize(captured);
       }},
      {"merge two captures", cudaErrorStreamCaptureMerge,
       [](cudaStream_t capturing) {
         const Recording other(cudaStreamCaptureModeRelaxed);
         cudaEvent_t captured = new_event();
         EXPECT_EQ(cudaEventRecord(captured, other.stream), cudaSuccess);
         const cudaError_t error = cudaStreamWaitEvent(capturing, captured, 0);
         other.end(cudaErrorStreamCaptureInvalidated);
         return error;
       }},
      {"call back", cudaErrorStreamCaptureUnsupported,
       [](cudaStream_t capturing) {
         return cudaStreamAddCallback(
             capturing, [](cudaStream_t, cudaError_t, void*) {}, nullptr, 0);
       }},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    const Recording recording;
    EXPECT_EQ(refusal.call(recording.stream), refusal.error);
    recording.expect_invalid();
  }
  // The refused cudaFree() has not freed the memory, and no capture is left.
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST(FakeGraphsTest, RefuseTheLegacyStreamBesideABlockingOne) {
  const Recording blocking(cudaStreamCaptureModeGlobal, cudaStreamDefault);
  EXPECT_EQ(fake_cuda::enqueue(nullptr, [] {}), cudaErrorStreamCaptureImplicit);
  blocking.expect_invalid();
  const Recording other;
  EXPECT_EQ(fake_cuda::enqueue(nullptr, [] {}), cudaSuccess);
  other.end();
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
}

TEST(FakeGraphsTest, RefuseABranchThatDoesNotJoin) {
  const Recording recording;
  cudaStream_t side = new_stream();
  cudaEvent_t fork = new_event();
  EXPECT_EQ(cudaEventRecord(fork, recording.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(side, fork, 0), cudaSuccess);
  EXPECT_EQ(fake_cuda::enqueue(side, [] {}), cudaSuccess);
  cudaGraph_t graph = nullptr;
  recording.end(cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(cudaStreamEndCapture(side, &graph), cudaErrorIllegalState);  // ended as well
}

TEST(FakeGraphsTest, EndWhereAndByWhomTheyWereBegun) {
  const Recording recording;
  cudaGraph_t graph = nullptr;
  std::thread([&] {
    EXPECT_EQ(cudaStreamEndCapture(recording.stream, &graph), cudaErrorStreamCaptureWrongThread);
  }).join();
  EXPECT_EQ(cudaStreamBeginCapture(recording.stream, cudaStreamCaptureModeGlobal),
            cudaErrorIllegalState);
  cudaStream_t side = new_stream();
  cudaEvent_t fork = new_event();
  EXPECT_EQ(cudaEventRecord(fork, recording.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(side, fork, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamEndCapture(side, &graph), cudaErrorStreamCaptureUnmatched);
  recording.expect_invalid();
}

TEST(FakeGraphsTest, ADestroyedStreamEndsItsCapture) {
  const Recording recording;
  EXPECT_EQ(cudaStreamDestroy(recording.stream), cudaSuccess);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
}

// ProcessGroupNCCL's watchdog queries events while another thread captures.
TEST(FakeGraphsTest, OtherThreadsMayDoWhatTheModeAllows) {
  cudaEvent_t event = new_event();
  const auto query_in_thread = [&](std::optional<cudaStreamCaptureMode> mode) {
    cudaError_t error = cudaSuccess;
    std::thread([&] {
      if (mode) {
        EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&*mode), cudaSuccess);
      }
      error = cudaEventQuery(event);
    }).join();
    return error;
  };
  {
    const Recording global(cudaStreamCaptureModeGlobal);
    EXPECT_EQ(query_in_thread(cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(query_in_thread({}), cudaErrorStreamCaptureUnsupported);
    global.expect_invalid();
  }
  {
    const Recording local(cudaStreamCaptureModeThreadLocal);
    EXPECT_EQ(query_in_thread({}), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorStreamCaptureUnsupported);
    local.expect_invalid();
  }
  const Recording relaxed(cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  relaxed.end();
}

/// Captures on another stream than the default one, as at::cuda::CUDAGraph requires.
void capture(at::cuda::CUDAGraph& graph, const std::function<void()>& run,
             const at::cuda::MempoolId_t& pool = {0, 0}) {
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  graph.capture_begin(pool);
  run();
  graph.capture_end();
}

void expect_torch_graph_trains() {
  at::manual_seed(1);
  const at::Tensor input = at::randn({4, 3, 6, 6}, kOnGpu);
  const at::Tensor weight = at::randn({2, 3, 3, 3}, kOnGpu).requires_grad_();
  weight.mutable_grad() = at::zeros_like(weight);
  const at::Tensor loss = at::zeros({}, kOnGpu);
  const auto step = [&] {
    const at::Tensor output = at::conv2d(input, weight).relu().pow(2).mean();
    output.backward();
    const at::NoGradGuard no_grad;
    loss.copy_(output);
    weight.sub_(weight.grad(), 0.1);
    weight.mutable_grad().zero_();
  };
  const at::Tensor start = weight.detach().clone();
  std::vector<float> expected;
  for (int i = 0; i < 5; ++i) {
    step();
    expected.push_back(loss.item<float>());
  }
  {
    const at::NoGradGuard no_grad;
    weight.copy_(start);
  }
  at::cuda::CUDAGraph graph;
  capture(graph, step);
  EXPECT_TRUE(weight.equal(start));
  for (const float value : expected) {
    const auto before = fake_cuda::counts();
    graph.replay();
    const auto counts = fake_cuda::counts() - before;
    EXPECT_EQ(counts[Count::kGraphs], 1U);
    EXPECT_EQ(counts[Count::kOperators], 0U);
    EXPECT_EQ(counts.host_waits(), 0U);
    EXPECT_FLOAT_EQ(loss.item<float>(), value);
  }
}

TEST(FakeGraphsTest, TorchsGraphTrainsAsEagerStepsDo) {
  expect_torch_graph_trains();
}

TEST(FakeGraphsTest, TorchsGraphTrainsAsEagerStepsDoWhenStreamsLag) {
  lag("4");
  expect_torch_graph_trains();
}

TEST(FakeGraphsTest, RandomNumbersDifferBetweenReplaysAndFollowTheSeed) {
  at::Tensor numbers;
  at::cuda::CUDAGraph graph;
  const at::Tensor ones = at::ones({100}, kOnGpu);
  capture(graph, [&] {
    numbers = at::stack({at::rand({100}, kOnGpu), at::dropout(ones, 0.5, true)});
  });
  const auto replay = [&] {
    graph.replay();
    return numbers.cpu();
  };
  at::manual_seed(6);
  const at::Tensor first = replay();
  const at::Tensor second = replay();
  EXPECT_FALSE(first[0].equal(second[0]));
  EXPECT_FALSE(first[1].equal(second[1]));
  at::manual_seed(6);
  EXPECT_TRUE(replay().equal(first));
  EXPECT_TRUE(replay().equal(second));
}

// A graph keeps its memory until it is reset; graphs may share a pool.
TEST(FakeGraphsTest, TorchsGraphHasItsOwnMemory) {
  const at::Tensor one = at::ones({1 << 20}, kOnGpu);
  at::cuda::CUDAGraph first;
  at::cuda::CUDAGraph second;
  at::Tensor from_first;
  at::Tensor from_second;
  capture(first, [&] { from_first = one * 2; });
  capture(
      second, [&] { from_second = from_first + 1; }, first.pool());
  EXPECT_EQ(first.pool(), second.pool());
  for (int i = 0; i < 3; ++i) {
    const at::Tensor other = at::full({1 << 20}, 9, kOnGpu);  // not in the graphs' memory
    first.replay();
    second.replay();
    EXPECT_EQ(from_second.min().item<float>(), 3);
    EXPECT_EQ(other.min().item<float>(), 9);
  }
}

TEST(FakeGraphsTest, TorchRefusesToCaptureWhatWaits) {
  const at::Tensor tensor = at::ones({4}, kOnGpu);
  at::cuda::CUDAGraph graph;
  EXPECT_THROW(capture(graph, [&] { tensor.sum().item<float>(); }), c10::Error);
}

}  // namespace
