// The functions of libnccl.so.2 that libtorch imports, with NCCL 2.28's checks of arguments.
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "communicator.h"
#include "fake_cuda.h"
#include "group.h"
#include "nccl_settings.h"
#include "operations.h"

/// fake_nccl::settings() looks this up.
extern "C" {
fake_nccl::Settings fake_nccl_settings;
}

namespace fake_nccl {
namespace {

using Communicator = std::shared_ptr<ncclComm>;

/// Returns the result of an expression from the enclosing function unless it is ncclSuccess.
#define FAKE_NCCL_CHECK(expression)             \
  do {                                          \
    const ncclResult_t checked = (expression);  \
    if (checked != ncclSuccess) return checked; \
  } while (false)

ncclResult_t check_pointer(const void* pointer, const char* function, const char* argument) {
  if (pointer != nullptr) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : %s argument is NULL", function, argument);
}

ncclResult_t find(ncclComm_t handle, const char* function, Communicator& found) {
  FAKE_NCCL_CHECK(check_pointer(handle, function, "comm"));
  found = ncclComm::find(handle);
  if (found) return ncclSuccess;
  return fail(ncclInvalidArgument, "Error: corrupted comm object detected");
}

/// find() for calls that require earlier calls to be complete.
ncclResult_t find_ready(ncclComm_t handle, const char* function, Communicator& found) {
  FAKE_NCCL_CHECK(find(handle, function, found));
  const ncclResult_t state = found->state();
  if (state != ncclInProgress) return state;
  return fail(ncclInvalidArgument,
              "Attempt to use communicator before the previous operation returned ncclSuccess");
}

/// NCCL checks buffers only with NCCL_CHECK_POINTERS=1; without it, NCCL's kernel fails.
ncclResult_t check_buffer(const ncclComm& communicator, const void* buffer, const char* function,
                          const char* argument) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, buffer);
  if (error != cudaSuccess || attributes.devicePointer == nullptr) {
    return fail(ncclInvalidArgument, "%s : %s %p is not a valid pointer", function, argument,
                buffer);
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != communicator.device) {
    return fail(ncclInvalidArgument, "%s : %s allocated on device %d mismatchs with NCCL device %d",
                function, argument, attributes.device, communicator.device);
  }
  return ncclSuccess;
}

ncclResult_t check_root(const ncclComm& communicator, int root, const char* function) {
  if (root >= 0 && root < communicator.ranks) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)",
              function, root, communicator.ranks);
}

ncclResult_t check_type(ncclDataType_t type, const char* function, bool is_reduced) {
  if (type >= 0 && type < ncclNumTypes && (!is_reduced || is_reducible(type))) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : invalid type %d", function, type);
}

ncclResult_t check_operation(ncclRedOp_t operation, const char* function) {
  if (operation < 0) {
    return fail(ncclInvalidArgument, "%s : invalid reduction operation %d", function, operation);
  }
  if (operation < ncclNumOps) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : reduction operation %d unknown to this communicator",
              function, operation);
}

/// Fails as NCCL does when CUDA is out of memory.
/// @param place value of FAKE_NCCL_CUDA_ERROR: "1" for collectives, or "set-up"
ncclResult_t check_cuda(const char* place) {
  const char* const fails = std::getenv("FAKE_NCCL_CUDA_ERROR");
  if (fails == nullptr || std::strcmp(fails, place) != 0) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "Cuda failure 2 'out of memory'");
}

ncclResult_t start(const Collective& call, ncclComm_t handle, cudaStream_t stream) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find_ready(handle, call.name, communicator));
  FAKE_NCCL_CHECK(check_cuda("1"));
  FAKE_NCCL_CHECK(check_root(*communicator, call.root, call.name));
  FAKE_NCCL_CHECK(check_type(call.type, call.name, call.reduces()));
  FAKE_NCCL_CHECK(check_operation(call.operation, call.name));
  if (call.count == 0) return ncclSuccess;
  if (cudaStreamGetPriority(stream, &fake_nccl_settings.priority) != cudaSuccess) {
    return ncclUnhandledCudaError;
  }
  const bool is_root = communicator->rank == call.root;
  if (call.kind != Kind::kBroadcast || is_root) {
    FAKE_NCCL_CHECK(check_buffer(*communicator, call.send, call.name, "sendbuff"));
  }
  if (call.kind != Kind::kReduce || is_root) {
    FAKE_NCCL_CHECK(check_buffer(*communicator, call.receive, call.name, "recvbuff"));
  }
  return Group::of_this_thread().add(communicator, stream, call);
}

ncclResult_t transfer(bool sends, const void* buffer, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t handle, cudaStream_t stream) {
  const char* const function = sends ? "Send" : "Recv";
  Communicator communicator;
  FAKE_NCCL_CHECK(find_ready(handle, function, communicator));
  FAKE_NCCL_CHECK(check_root(*communicator, peer, function));
  FAKE_NCCL_CHECK(check_type(type, function, false));
  if (count > 0) FAKE_NCCL_CHECK(check_buffer(*communicator, buffer, function, "buff"));
  return Group::of_this_thread().add(
      communicator, stream,
      Transfer{sends, const_cast<void*>(buffer), count * size_of(type), peer});
}

ncclResult_t check_config(const ncclConfig_t& config) {
  fake_nccl_settings.blocking = config.blocking;
  fake_nccl_settings.min_ctas = config.minCTAs;
  fake_nccl_settings.max_ctas = config.maxCTAs;
  const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
  if (config.magic != initial.magic) {
    return fail(ncclInvalidArgument,
                "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  const auto is_given = [](int value) { return value != NCCL_CONFIG_UNDEF_INT; };
  if (is_given(config.blocking) && config.blocking != 0 && config.blocking != 1) {
    return fail(ncclInvalidArgument, "Invalid config blocking attribute value %d", config.blocking);
  }
  const bool has_minimum = is_given(config.minCTAs);
  const bool has_maximum = is_given(config.maxCTAs);
  if ((has_minimum && config.minCTAs <= 0) || (has_maximum && config.maxCTAs <= 0) ||
      (has_minimum && has_maximum && config.minCTAs > config.maxCTAs)) {
    return fail(ncclInvalidArgument, "Invalid config min/max channels attribute value %d/%d",
                config.minCTAs, config.maxCTAs);
  }
  return ncclSuccess;
}

/// @param config null: returns `otherwise`
bool is_blocking(const ncclConfig_t* config, bool otherwise) {
  if (config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT) return otherwise;
  return config->blocking == 1;
}

/// Returns a communicator's handle and lets it join its peers.
ncclResult_t join(const Communicator& communicator, ncclComm_t* out) {
  *out = ncclComm::publish(communicator);
  return Group::of_this_thread().add([communicator, out] {
    const ncclResult_t result =
        communicator->run([self = communicator.get()] { return self->join(); });
    if (result != ncclSuccess && result != ncclInProgress) {
      communicator->abort();
      *out = nullptr;
    }
    return result;
  });
}

ncclResult_t init(ncclComm_t* out, int ranks, const char* id, int rank, const ncclConfig_t* config,
                  const char* function) {
  FAKE_NCCL_CHECK(check_pointer(out, function, "newcomm"));
  if (config != nullptr) FAKE_NCCL_CHECK(check_config(*config));
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    return fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, ranks);
  }
  FAKE_NCCL_CHECK(check_cuda("set-up"));
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return ncclUnhandledCudaError;
  return join(std::make_shared<ncclComm>(id, rank, ranks, device, is_blocking(config, true)), out);
}

/// A rank's arguments of a split.
struct Wish {
  int color = 0;
  int key = 0;
  int rank = 0;
};

ncclResult_t split(const Communicator& parent, Wish own, ncclComm_t* out, bool blocks) {
  std::vector<Wish> members = parent->exchange(own);
  const int number = parent->splits++;
  if (own.color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::erase_if(members, [&own](const Wish& other) { return other.color != own.color; });
  std::sort(members.begin(), members.end(), [](const Wish& a, const Wish& b) {
    return std::pair(a.key, a.rank) < std::pair(b.key, b.rank);
  });
  const auto self = std::find_if(members.begin(), members.end(),
                                 [&own](const Wish& other) { return other.rank == own.rank; });
  const auto made = std::make_shared<ncclComm>(
      parent->name + "." + std::to_string(number) + "." + std::to_string(own.color),
      static_cast<int>(self - members.begin()), static_cast<int>(members.size()), parent->device,
      blocks);
  *out = ncclComm::publish(made);
  fake_cuda::count(fake_cuda::Count::kSplits);
  return made->run([self = made.get()] { return self->join(); });
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

#pragma GCC visibility push(default)
extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  FAKE_NCCL_CHECK(check_pointer(version, "GetVersion", "version"));
  const char* const given = std::getenv("FAKE_NCCL_VERSION");
  *version = given == nullptr ? NCCL_VERSION_CODE : std::stoi(given);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t /*communicator*/) {
  return last_error();
}

// Communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  FAKE_NCCL_CHECK(check_pointer(id, "GetUniqueId", "out"));
  std::memset(id, 0, sizeof *id);
  std::random_device random;
  std::snprintf(id->internal, sizeof id->internal, "/fake-nccl-%d-%08x%08x", ::getpid(), random(),
                random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
  return init(out, ranks, id.internal, rank, nullptr, "CommInitRank");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return init(out, ranks, id.internal, rank, config, "CommInitRankConfig");
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out,
                           ncclConfig_t* config) {
  Communicator parent;
  FAKE_NCCL_CHECK(find_ready(handle, "CommSplit", parent));
  FAKE_NCCL_CHECK(check_pointer(out, "CommSplit", "newcomm"));
  if (config != nullptr) FAKE_NCCL_CHECK(check_config(*config));
  if (color < NCCL_SPLIT_NOCOLOR) {
    return fail(ncclInvalidArgument, "Invalid color value %d, must be non-negative", color);
  }
  FAKE_NCCL_CHECK(check_cuda("set-up"));
  *out = nullptr;
  const bool blocks = is_blocking(config, parent->is_blocking);
  return Group::of_this_thread().add([=] {
    return split(parent, {color, key, parent->rank}, out, blocks);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find_ready(handle, "CommFinalize", communicator));
  return communicator->finalize();
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  Communicator communicator;
  FAKE_NCCL_CHECK(find(handle, "CommDestroy", communicator));
  return communicator->destroy();
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  Communicator communicator;
  FAKE_NCCL_CHECK(find(handle, "CommAbort", communicator));
  return communicator->abort();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find(handle, "ncclGetAsyncError", communicator));
  FAKE_NCCL_CHECK(check_pointer(error, "ncclGetAsyncError", "asyncError"));
  *error = communicator->state();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find_ready(handle, "CommCount", communicator));
  FAKE_NCCL_CHECK(check_pointer(count, "CommCount", "count"));
  *count = communicator->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find_ready(handle, "CommUserRank", communicator));
  FAKE_NCCL_CHECK(check_pointer(rank, "CommUserRank", "rank"));
  *rank = communicator->rank;
  return ncclSuccess;
}

// Memory. Registration speeds NCCL up and changes no result.

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* buffer, size_t /*size*/,
                              void** registration) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find(handle, "CommRegister", communicator));
  FAKE_NCCL_CHECK(check_buffer(*communicator, buffer, "CommRegister", "buff"));
  fake_cuda::count(fake_cuda::Count::kRegistrations);
  *registration = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* /*registration*/) {
  Communicator communicator;
  return find(handle, "CommDeregister", communicator);
}

// Operations

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t handle, cudaStream_t stream) {
  return start({Kind::kAllReduce, "AllReduce", send, receive, count, type, operation}, handle,
               stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t handle, cudaStream_t stream) {
  return start({Kind::kReduce, "Reduce", send, receive, count, type, operation, root}, handle,
               stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t handle, cudaStream_t stream) {
  return start({Kind::kBroadcast, "Broadcast", send, receive, count, type, ncclSum, root}, handle,
               stream);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t handle,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, handle, stream);
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t handle, cudaStream_t stream) {
  return start({Kind::kAllGather, "AllGather", send, receive, count, type}, handle, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t handle, cudaStream_t stream) {
  return start({Kind::kReduceScatter, "ReduceScatter", send, receive, count, type, operation},
               handle, stream);
}

ncclResult_t ncclSend(const void* buffer, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t handle, cudaStream_t stream) {
  return transfer(true, buffer, count, type, peer, handle, stream);
}

ncclResult_t ncclRecv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  return transfer(false, buffer, count, type, peer, handle, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type,
                          ncclComm_t handle, cudaStream_t stream) {
  Communicator communicator;
  FAKE_NCCL_CHECK(find_ready(handle, "AlltoAll", communicator));
  FAKE_NCCL_CHECK(check_type(type, "AlltoAll", false));
  const size_t bytes = count * size_of(type);
  Group& group = Group::of_this_thread();
  group.start();
  ncclResult_t result = ncclSuccess;
  for (int peer = 0; peer < communicator->ranks && result == ncclSuccess; ++peer) {
    const size_t at = static_cast<size_t>(peer) * bytes;
    result = ncclSend(static_cast<const char*>(send) + at, count, type, peer, handle, stream);
    if (result != ncclSuccess) break;
    result = ncclRecv(static_cast<char*>(receive) + at, count, type, peer, handle, stream);
  }
  const ncclResult_t ended = group.end();
  return result != ncclSuccess ? result : ended;
}

// Groups

ncclResult_t ncclGroupStart() {
  Group::of_this_thread().start();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  return Group::of_this_thread().end();
}

}  // extern "C"
#pragma GCC visibility pop
