// A stand-in for libnccl.so.2: ranks are processes or threads of one host, bytes go through a
// shared-memory segment, and every operation runs in the order of its (fake) stream.
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "fake_cuda.h"

namespace {

constexpr size_t kSlot = 256 << 10;  // bytes of a rank in one round of a collective
constexpr size_t kMail = 32 << 10;   // bytes of a message between two ranks
constexpr int kMaxRanks = 16;

struct Mail {
  std::atomic<uint32_t> full;
  uint32_t size;
  char bytes[kMail];
};
struct Segment {
  std::atomic<int> joined;
  std::atomic<uint32_t> arrived, round;
  alignas(64) char slots[kMaxRanks][kSlot];
  Mail mail[kMaxRanks][kMaxRanks];  // [from][to]
};

struct Aborted {};

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

template <typename T>
void reduce(T* into, const Segment& s, int ranks, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; ++i) {
    const auto at = [&](int r) { return reinterpret_cast<const T*>(s.slots[r])[i]; };
    T x = at(0);
    for (int r = 1; r < ranks; ++r) {
      const T y = at(r);
      switch (op) {
        case ncclProd:
          x = static_cast<T>(x * y);
          break;
        case ncclMax:
          x = y > x ? y : x;
          break;
        case ncclMin:
          x = y < x ? y : x;
          break;
        default:
          x = static_cast<T>(x + y);
      }
    }
    into[i] = op == ncclAvg ? static_cast<T>(x / static_cast<T>(ranks)) : x;
  }
}
void reduce(void* into, const Segment& s, int ranks, size_t count, ncclDataType_t type,
            ncclRedOp_t op) {
  const auto as = [&](auto zero) {
    reduce(static_cast<decltype(zero)*>(into), s, ranks, count, op);
  };
  switch (type) {
    case ncclInt8:
      return as(int8_t{});
    case ncclUint8:
      return as(uint8_t{});
    case ncclInt32:
      return as(int32_t{});
    case ncclUint32:
      return as(uint32_t{});
    case ncclInt64:
      return as(int64_t{});
    case ncclUint64:
      return as(uint64_t{});
    case ncclFloat16:
      return as(c10::Half{});
    case ncclFloat32:
      return as(float{});
    case ncclFloat64:
      return as(double{});
    case ncclBfloat16:
      return as(c10::BFloat16{});
    default:
      std::fprintf(stderr, "fake_cuda: reduction of type %d\n", type);
      std::abort();
  }
}

}  // namespace

struct ncclComm {
  int rank, ranks, splits = 0;
  std::string name;
  Segment* segment;
  std::atomic<bool> aborted{false};

  template <typename Ready>
  void wait(Ready ready) {
    for (int i = 0; !ready(); ++i) {
      if (aborted) throw Aborted();
      if (i > 200)
        std::this_thread::sleep_for(std::chrono::microseconds(i > 2000 ? 500 : 20));
      else
        std::this_thread::yield();
    }
  }
  void barrier() {
    const uint32_t round = segment->round.load();
    if (segment->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) {
      segment->arrived = 0;
      ++segment->round;
    } else {
      wait([&] { return segment->round.load() != round; });
    }
  }
  /// Rounds of: everybody puts up to kSlot bytes (of `size` in all), everybody takes.
  template <typename Put, typename Take>
  void rounds(size_t size, size_t unit, Put put, Take take) {
    const size_t step = kSlot / unit * unit;
    for (size_t at = 0; at < size; at += step) {
      const size_t n = std::min(step, size - at);
      put(segment->slots[rank], at, n);
      barrier();
      take(at, n);
      barrier();
    }
  }
};

namespace {

struct Transfer {
  bool send;
  char* bytes;
  size_t size;
  int peer;
};

/// The two halves of sends and receives of a group progress together.
void run_transfers(ncclComm& c, std::vector<Transfer> all) {
  c.wait([&] {
    bool open = false;
    std::vector<bool> busy(2 * kMaxRanks);
    for (Transfer& t : all) {
      if (t.size == 0) continue;
      open = true;
      if (busy[2 * t.peer + t.send]) continue;  // in order to and from each peer
      busy[2 * t.peer + t.send] = true;
      Mail& mail = t.send ? c.segment->mail[c.rank][t.peer] : c.segment->mail[t.peer][c.rank];
      if (mail.full.load() != (t.send ? 0U : 1U)) continue;
      if (t.send) {
        mail.size = std::min(t.size, kMail);
        std::memcpy(mail.bytes, t.bytes, mail.size);
      } else {
        std::memcpy(t.bytes, mail.bytes, mail.size);
      }
      t.bytes += mail.size;
      t.size -= mail.size;
      mail.full = t.send ? 1 : 0;
    }
    return !open;
  });
}

struct Group {
  int depth = 0;
  struct Part {
    ncclComm* comm;
    cudaStream_t stream;
    std::vector<Transfer> transfers;
    std::vector<std::function<void()>> collectives;
  };
  std::vector<Part> parts;
  Part& part(ncclComm* comm, cudaStream_t stream) {
    for (Part& p : parts)
      if (p.comm == comm && p.stream == stream) return p;
    return parts.emplace_back(Part{comm, stream, {}, {}});
  }
};
thread_local Group group;

ncclResult_t flush() {
  for (Group::Part& p : std::exchange(group.parts, {})) {
    fake_cuda::enqueue(
        p.stream,
        [p = std::move(p)] {
          try {
            if (p.comm->aborted) return;
            for (const auto& run : p.collectives) run();
            if (!p.transfers.empty()) run_transfers(*p.comm, p.transfers);
          } catch (const Aborted&) {
          }
        },
        p.comm->ranks > 1);
  }
  return ncclSuccess;
}
ncclResult_t collective(ncclComm* c, cudaStream_t s, std::function<void()> run) {
  group.part(c, s).collectives.push_back(std::move(run));
  return group.depth ? ncclSuccess : flush();
}
ncclResult_t transfer(ncclComm* c, cudaStream_t s, bool send, const void* p, size_t size,
                      int peer) {
  auto* bytes = static_cast<char*>(fake_cuda::host(p));
  group.part(c, s).transfers.push_back({send, bytes, size, peer});
  return group.depth ? ncclSuccess : flush();
}

ncclResult_t join(ncclComm_t* comm, int ranks, std::string name, int rank) {
  if (ranks > kMaxRanks) return ncclInvalidArgument;
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Segment)) != 0) return ncclSystemError;
  void* at = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return ncclSystemError;
  *comm = new ncclComm{rank, ranks, 0, name, static_cast<Segment*>(at)};
  Segment* segment = (*comm)->segment;
  if (segment->joined.fetch_add(1) + 1 == ranks) shm_unlink(name.c_str());
  (*comm)->wait([&] { return segment->joined.load() >= ranks; });
  return ncclSuccess;
}

void* host(const void* p) {
  return fake_cuda::host(p);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  std::random_device random;
  std::snprintf(id->internal, sizeof id->internal, "/fake-nccl-%d-%08x%08x", getpid(), random(),
                random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return join(c, n, id.internal, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return join(c, n, id.internal, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  return join(c, n, ids[0].internal, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  struct Wish {
    int color, key, rank;
  } mine{color, key, c->rank};
  std::vector<Wish> all(c->ranks);
  c->rounds(
      sizeof mine, sizeof mine, [&](char* slot, size_t, size_t n) { std::memcpy(slot, &mine, n); },
      [&](size_t, size_t) {
        for (int r = 0; r < c->ranks; ++r) std::memcpy(&all[r], c->segment->slots[r], sizeof mine);
      });
  const int split = c->splits++;
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int rank = 0, ranks = 0;
  for (const Wish& w : all) {
    if (w.color != color) continue;
    ++ranks;
    rank += w.key < key || (w.key == key && w.rank < c->rank);
  }
  return join(out, ranks, c->name + "." + std::to_string(split) + "." + std::to_string(color),
              rank);
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
  c->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) {
  *rank = c->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void** p, size_t size) {
  return cudaMalloc(p, size) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void* p) {
  cudaFree(p);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t e) {
  return e == ncclSuccess ? "no error" : "fake NCCL error";
}
const char* ncclGetLastError(ncclComm_t) {
  return "";
}
ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return --group.depth == 0 ? flush() : ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return collective(c, s, [=, in = (char*)host(from), out = (char*)host(to)] {
    const size_t unit = size_of(type);
    c->rounds(
        count * unit, unit, [&](char* slot, size_t at, size_t n) { std::memcpy(slot, in + at, n); },
        [&](size_t at, size_t n) { reduce(out + at, *c->segment, c->ranks, n / unit, type, op); });
  });
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
  return collective(c, s, [=, in = (char*)host(from), out = (char*)host(to)] {
    const size_t unit = size_of(type);
    c->rounds(
        count * unit, unit, [&](char* slot, size_t at, size_t n) { std::memcpy(slot, in + at, n); },
        [&](size_t at, size_t n) {
          if (c->rank == root) reduce(out + at, *c->segment, c->ranks, n / unit, type, op);
        });
  });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t c, cudaStream_t s) {
  return collective(c, s, [=, in = (char*)host(from), out = (char*)host(to)] {
    c->rounds(
        count * size_of(type), 1,
        [&](char* slot, size_t at, size_t n) {
          if (c->rank == root) std::memcpy(slot, in + at, n);
        },
        [&](size_t at, size_t n) { std::memcpy(out + at, c->segment->slots[root], n); });
  });
}
ncclResult_t ncclBcast(void* p, size_t count, ncclDataType_t type, int root, ncclComm_t c,
                       cudaStream_t s) {
  return ncclBroadcast(p, p, count, type, root, c, s);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t s) {
  return collective(c, s, [=, in = (char*)host(from), out = (char*)host(to)] {
    const size_t size = count * size_of(type);
    c->rounds(
        size, 1, [&](char* slot, size_t at, size_t n) { std::memcpy(slot, in + at, n); },
        [&](size_t at, size_t n) {
          for (int r = 0; r < c->ranks; ++r)
            std::memcpy(out + r * size + at, c->segment->slots[r], n);
        });
  });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return collective(c, s, [=, in = (char*)host(from), out = (char*)host(to)] {
    const size_t unit = size_of(type), size = count * unit;
    std::vector<char> copy(in, in + size * c->ranks);  // in place: out is a part of in
    for (int r = 0; r < c->ranks; ++r) {
      c->rounds(
          size, unit,
          [&](char* slot, size_t at, size_t n) {
            std::memcpy(slot, copy.data() + r * size + at, n);
          },
          [&](size_t at, size_t n) {
            if (r == c->rank) reduce(out + at, *c->segment, c->ranks, n / unit, type, op);
          });
    }
  });
}
ncclResult_t ncclSend(const void* p, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s) {
  return transfer(c, s, true, p, count * size_of(type), peer);
}
ncclResult_t ncclRecv(void* p, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s) {
  return transfer(c, s, false, p, count * size_of(type), peer);
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t c, cudaStream_t s) {
  const size_t size = count * size_of(type);
  ncclGroupStart();
  for (int r = 0; r < c->ranks; ++r) {
    ncclSend((const char*)from + r * size, count, type, r, c, s);
    ncclRecv((char*)to + r * size, count, type, r, c, s);
  }
  return ncclGroupEnd();
}
}  // extern "C"
#pragma GCC visibility pop
