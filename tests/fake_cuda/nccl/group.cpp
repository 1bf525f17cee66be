#include "group.h"

#include <future>
#include <utility>

#include "fake_cuda.h"

namespace fake_nccl {
namespace {

/// An error takes precedence over ncclInProgress, which takes precedence over success.
ncclResult_t worse(ncclResult_t a, ncclResult_t b) {
  if (a == ncclSuccess || (a == ncclInProgress && b != ncclSuccess)) return b;
  return a;
}

}  // namespace

Group& Group::of_this_thread() {
  static thread_local Group group;
  return group;
}

ncclResult_t Group::end() {
  if (depth_ == 0) {
    return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  }
  return --depth_ > 0 ? ncclSuccess : start_all();
}

Group::Batch& Group::batch(const std::shared_ptr<ncclComm>& communicator, cudaStream_t stream) {
  for (Batch& one : batches_) {
    if (one.communicator == communicator && one.stream == stream) return one;
  }
  return batches_.emplace_back(Batch{communicator, stream});
}

ncclResult_t Group::add(const std::shared_ptr<ncclComm>& communicator, cudaStream_t stream,
                        const Collective& collective) {
  batch(communicator, stream).collectives.push_back(collective);
  return start_unless_grouped();
}

ncclResult_t Group::add(const std::shared_ptr<ncclComm>& communicator, cudaStream_t stream,
                        const Transfer& transfer) {
  batch(communicator, stream).transfers.push_back(transfer);
  return start_unless_grouped();
}

ncclResult_t Group::add(std::function<ncclResult_t()> job) {
  jobs_.push_back(std::move(job));
  return start_unless_grouped();
}

ncclResult_t Group::start_all() {
  ncclResult_t result = ncclSuccess;
  const auto jobs = std::exchange(jobs_, {});
  if (jobs.size() == 1) {
    result = jobs.front()();
  } else {
    std::vector<std::future<ncclResult_t>> running;
    for (const auto& job : jobs) running.push_back(std::async(std::launch::async, job));
    for (auto& one : running) result = worse(result, one.get());
  }
  for (Batch& one : std::exchange(batches_, {})) {
    const std::shared_ptr<ncclComm> communicator = one.communicator;
    const cudaStream_t stream = one.stream;
    const bool blocks = communicator->ranks > 1;
    const ncclResult_t met =
        one.collectives.empty()
            ? ncclSuccess
            : communicator->meet_in_first_call(static_cast<int>(one.collectives[0].kind));
    if (met != ncclSuccess && met != ncclInProgress) {
      result = worse(result, met);
      continue;
    }
    const auto work = [batch = std::move(one), held = communicator->hold()] {
      batch.communicator->operate([&batch] {
        for (const Collective& one : batch.collectives) run(*batch.communicator, one);
        if (!batch.transfers.empty()) run(*batch.communicator, batch.transfers);
      });
    };
    fake_cuda::count(fake_cuda::Count::kCollectives);
    if (const cudaError_t error = fake_cuda::enqueue(stream, work, blocks); error != cudaSuccess) {
      result = worse(result, fail(ncclUnhandledCudaError, "Cuda failure %d '%s'", error,
                                  cudaGetErrorString(error)));
      continue;
    }
    result = worse(result, communicator->connect());
  }
  return result;
}

}  // namespace fake_nccl
