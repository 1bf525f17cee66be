// The stand-in for NCCL, called directly. Each rank is a process with a device of its own.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda/nccl_settings.h"
#include "support/environment_guard.h"
#include "support/eventually.h"
#include "support/multiproc.h"

namespace {

using std::chrono::milliseconds;
using syncbn::test::eventually;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::HasSubstr;

class FakeNcclTest : public ::testing::Test {
 private:
  const syncbn::test::Environment devices_{"FAKE_CUDA_DEVICES", "8"};
};

ncclUniqueId new_id() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return id;
}

ncclConfig_t non_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

ncclResult_t async_error(ncclComm_t communicator) {
  ncclResult_t error = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(communicator, &error), ncclSuccess);
  return error;
}

bool becomes_ready(ncclComm_t communicator) {
  return eventually([=] { return async_error(communicator) != ncclInProgress; }) &&
         async_error(communicator) == ncclSuccess;
}

/// A flag in memory that all ranks share.
class SharedFlag {
 public:
  void set() { *flag_ = true; }
  bool is_set() const { return *flag_; }

 private:
  std::atomic<bool>* flag_ = new (::mmap(nullptr, sizeof(*flag_), PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<bool>;
};

/// A rank with a device, a communicator and a stream.
struct Rank {
  Rank(const ncclUniqueId& id, int ranks, int number, int device) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    EXPECT_EQ(ncclCommInitRank(&communicator, ranks, id, number), ncclSuccess);
  }
  Rank(const ncclUniqueId& id, int ranks, int number) : Rank(id, ranks, number, number) {}

  /// Whether the stream becomes idle within the time of eventually().
  bool becomes_idle() const {
    return eventually([this] { return cudaStreamQuery(stream) == cudaSuccess; });
  }

  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
};

/// Values in the memory of the current device.
template <class T>
class Buffer {
 public:
  explicit Buffer(const std::vector<T>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  size_t size() const { return size_; }
  /// Waits for the whole device first.
  std::vector<T> values() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<T> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

/// first, first + 1, ...; more bytes than a slot of the shared segment holds, and an odd number.
std::vector<float> many(float first, size_t count = 100003) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

bool has_named_segments(int process) {
  const std::string prefix = "fake-nccl-" + std::to_string(process);
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    if (file.path().filename().string().starts_with(prefix)) return true;
  }
  return false;
}

void expect_collectives(const Rank& rank, int number, int ranks) {
  const auto n = static_cast<float>(ranks);
  const auto own = static_cast<float>(number);
  const Buffer<float> sum(many(own));
  const size_t count = sum.size();
  EXPECT_EQ(ncclAllReduce(sum.data(), sum.data(), count, ncclFloat, ncclSum, rank.communicator,
                          rank.stream),
            ncclSuccess);
  const std::vector<float> sums = sum.values();
  for (size_t i = 0; i < count; i += 991) {
    ASSERT_EQ(sums[i], n * static_cast<float>(i) + n * (n - 1) / 2);
  }

  const Buffer<int64_t> greatest({number, -number, 7});
  ncclAllReduce(greatest.data(), greatest.data(), 3, ncclInt64, ncclMax, rank.communicator,
                rank.stream);
  EXPECT_EQ(greatest.values(), (std::vector<int64_t>{ranks - 1, 0, 7}));
  const Buffer<double> mean({2.0 * number, 1});
  ncclAllReduce(mean.data(), mean.data(), 2, ncclDouble, ncclAvg, rank.communicator, rank.stream);
  EXPECT_EQ(mean.values(), (std::vector<double>{ranks - 1.0, 1}));

  const Buffer<float> reduced({own, 1});
  const Buffer<float> result({-1, -1});
  ncclReduce(reduced.data(), result.data(), 2, ncclFloat, ncclProd, ranks - 1, rank.communicator,
             rank.stream);
  const std::vector<float> product{ranks == 1 ? own : 0, 1};
  EXPECT_EQ(result.values(), number == ranks - 1 ? product : (std::vector<float>{-1, -1}));

  const Buffer<float> sent(many(own * 1000));
  ncclBcast(sent.data(), count, ncclFloat, ranks - 1, rank.communicator, rank.stream);
  EXPECT_EQ(sent.values(), many((n - 1) * 1000));

  std::vector<float> expected;
  for (int peer = 0; peer < ranks; ++peer) expected.push_back(static_cast<float>(peer));
  const Buffer<float> gathered(std::vector<float>(static_cast<size_t>(ranks), own));
  ncclAllGather(gathered.data() + number, gathered.data(), 1, ncclFloat, rank.communicator,
                rank.stream);
  EXPECT_EQ(gathered.values(), expected);
  ncclReduceScatter(gathered.data(), gathered.data() + number, 1, ncclFloat, ncclSum,
                    rank.communicator, rank.stream);
  expected[static_cast<size_t>(number)] *= n;
  EXPECT_EQ(gathered.values(), expected);

  std::vector<int64_t> to_all;
  std::vector<int64_t> from_all;
  for (int peer = 0; peer < ranks; ++peer) {
    to_all.push_back(100 * number + peer);
    from_all.push_back(100 * peer + number);
  }
  const Buffer<int64_t> sends(to_all);
  const Buffer<int64_t> receives(std::vector<int64_t>(to_all.size()));
  ncclAlltoAll(sends.data(), receives.data(), 1, ncclInt64, rank.communicator, rank.stream);
  EXPECT_EQ(receives.values(), from_all);
}

TEST_F(FakeNcclTest, CollectivesOfOneTwoAndEightRanks) {
  for (const int ranks : {1, 2, 8}) {
    const ncclUniqueId id = new_id();
    run_ranks(ranks, [&](int number) {
      const Rank rank(id, ranks, number);
      expect_collectives(rank, number, ranks);
      EXPECT_EQ(ncclCommDestroy(rank.communicator), ncclSuccess);
      EXPECT_FALSE(fake_nccl::has_communicators());
    });
    EXPECT_FALSE(has_named_segments(::getpid()));
  }
}

TEST_F(FakeNcclTest, SendsAndRecvsOfAGroupMakeProgressTogether) {
  const ncclUniqueId id = new_id();
  run_ranks(4, [&](int number) {
    const Rank rank(id, 4, number);
    const Buffer<float> to_next(many(static_cast<float>(number)));
    const Buffer<float> to_self(many(-1, 10));
    const Buffer<float> from_previous(many(0));
    const Buffer<float> from_self(many(0, 10));
    ncclGroupStart();
    ncclSend(to_next.data(), to_next.size(), ncclFloat, (number + 1) % 4, rank.communicator,
             rank.stream);
    ncclSend(to_self.data(), 10, ncclFloat, number, rank.communicator, rank.stream);
    ncclRecv(from_self.data(), 10, ncclFloat, number, rank.communicator, rank.stream);
    ncclRecv(from_previous.data(), from_previous.size(), ncclFloat, (number + 3) % 4,
             rank.communicator, rank.stream);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    EXPECT_EQ(from_previous.values(), many(static_cast<float>((number + 3) % 4)));
    EXPECT_EQ(from_self.values(), many(-1, 10));
  });
}

TEST_F(FakeNcclTest, ANonBlockingCommunicatorIsInProgressUntilTheLastRankComes) {
  const ncclUniqueId id = new_id();
  SharedFlag has_looked;
  run_ranks(2, [&](int number) {
    cudaSetDevice(number);
    if (number == 1) {
      ASSERT_TRUE(eventually([&] { return has_looked.is_set(); }));
    }
    ncclConfig_t config = non_blocking();
    ncclComm_t communicator = nullptr;
    EXPECT_EQ(ncclCommInitRankConfig(&communicator, 2, id, number, &config), ncclInProgress);
    ASSERT_NE(communicator, nullptr);
    const Buffer<float> value({1});
    if (number == 0) {
      EXPECT_EQ(async_error(communicator), ncclInProgress);
      EXPECT_EQ(
          ncclAllReduce(value.data(), value.data(), 1, ncclFloat, ncclSum, communicator, nullptr),
          ncclInvalidArgument);
      EXPECT_THAT(ncclGetLastError(communicator), HasSubstr("before the previous operation"));
      has_looked.set();
    }
    ASSERT_TRUE(becomes_ready(communicator));
    EXPECT_EQ(
        ncclAllReduce(value.data(), value.data(), 1, ncclFloat, ncclSum, communicator, nullptr),
        ncclInProgress);
    ASSERT_TRUE(becomes_ready(communicator));
    EXPECT_EQ(value.values(), std::vector<float>{2});
    EXPECT_EQ(ncclCommFinalize(communicator), ncclInProgress);
    EXPECT_TRUE(becomes_ready(communicator));
    EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
  });
}

TEST_F(FakeNcclTest, AbortEndsTheSetUpThatWaitsForAPeer) {
  run_ranks(1, [](int) {
    ncclConfig_t config = non_blocking();
    ncclComm_t communicator = nullptr;
    EXPECT_EQ(ncclCommInitRankConfig(&communicator, 2, new_id(), 0, &config), ncclInProgress);
    EXPECT_EQ(ncclCommAbort(communicator), ncclSuccess);
    EXPECT_FALSE(fake_nccl::has_communicators());
    EXPECT_FALSE(has_named_segments(::getpid()));
  });
}

TEST_F(FakeNcclTest, SplitsByColorInTheOrderOfKeys) {
  const ncclUniqueId id = new_id();
  run_ranks(4, [&](int number) {
    const Rank rank(id, 4, number);
    ncclComm_t part = nullptr;
    const int color = number == 3 ? NCCL_SPLIT_NOCOLOR : number % 2;
    EXPECT_EQ(ncclCommSplit(rank.communicator, color, -number, &part, nullptr), ncclSuccess);
    if (number == 3) {
      EXPECT_EQ(part, nullptr);
      return;
    }
    int ranks = 0;
    int own = 0;
    ncclCommCount(part, &ranks);
    ncclCommUserRank(part, &own);
    EXPECT_EQ(ranks, number == 1 ? 1 : 2);
    EXPECT_EQ(own, number == 0 ? 1 : 0);
    const Buffer<float> value({static_cast<float>(1 + number)});
    ncclAllReduce(value.data(), value.data(), 1, ncclFloat, ncclSum, part, rank.stream);
    EXPECT_EQ(value.values(), std::vector<float>{number == 1 ? 2.F : 4.F});
  });
}

TEST_F(FakeNcclTest, FinalizeAndDestroyWaitForPeers) {
  for (const bool finalizes : {true, false}) {
    const ncclUniqueId id = new_id();
    SharedFlag has_come;
    run_ranks(2, [&](int number) {
      const Rank rank(id, 2, number);
      if (number == 1) {
        std::this_thread::sleep_for(milliseconds(500));  // rank 0 waits in its call meanwhile
        has_come.set();
      }
      if (finalizes) {
        EXPECT_EQ(ncclCommFinalize(rank.communicator), ncclSuccess);
      }
      EXPECT_EQ(ncclCommDestroy(rank.communicator), ncclSuccess);
      EXPECT_TRUE(has_come.is_set());
      EXPECT_EQ(ncclCommDestroy(rank.communicator), ncclInvalidArgument);
    });
  }
}

/// Starts an all-reduce in which rank 1 takes no part.
void start_alone(const Rank& rank, const Buffer<float>& value) {
  EXPECT_EQ(ncclAllReduce(value.data(), value.data(), 1, ncclFloat, ncclSum, rank.communicator,
                          rank.stream),
            ncclSuccess);
}

TEST_F(FakeNcclTest, APeerThatDiedIsNotNoticedAndAbortEndsTheWait) {
  const ncclUniqueId id = new_id();
  const auto ended = run_ranks_and_collect({.world_size = 2}, [&](int number) {
    const Rank rank(id, 2, number);
    if (number == 1) ::raise(SIGKILL);
    const Buffer<float> value({1});
    start_alone(rank, value);
    std::this_thread::sleep_for(milliseconds(1500));  // over sockets, it is noticed within 0.3 s
    EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
    EXPECT_EQ(async_error(rank.communicator), ncclSuccess);
    std::thread other([&] { EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess); });
    EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
    other.join();
    EXPECT_FALSE(fake_nccl::has_communicators());
  });
  EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
  EXPECT_EQ(ended[1].exit_code, 128 + SIGKILL);
}

TEST_F(FakeNcclTest, OverSocketsAPeerThatDiedIsARemoteErrorAndTheKernelStillWaits) {
  const syncbn::test::Environment sockets("FAKE_NCCL_DEAD_PEER", "remote_error");
  const ncclUniqueId id = new_id();
  const auto ended = run_ranks_and_collect({.world_size = 2}, [&](int number) {
    const Rank rank(id, 2, number);
    if (number == 1) ::raise(SIGKILL);
    const Buffer<float> value({1});
    start_alone(rank, value);
    EXPECT_TRUE(eventually([&] { return async_error(rank.communicator) == ncclRemoteError; }));
    EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
    EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
    EXPECT_TRUE(rank.becomes_idle());
  });
  EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
}

TEST_F(FakeNcclTest, RanksWithDifferentCallsHangUntilAborted) {
  const std::vector<std::function<void(const Rank&, const Buffer<float>&)>> calls_of_rank_1{
      [](const Rank& rank, const Buffer<float>& value) {
        ncclAllReduce(value.data(), value.data(), 3, ncclFloat, ncclSum, rank.communicator,
                      rank.stream);
      },
      [](const Rank& rank, const Buffer<float>& value) {
        ncclAllReduce(value.data(), value.data(), 2, ncclInt32, ncclSum, rank.communicator,
                      rank.stream);
      },
      [](const Rank& rank, const Buffer<float>& value) {
        ncclBroadcast(value.data(), value.data(), 2, ncclFloat, 1, rank.communicator, rank.stream);
      },
  };
  for (const auto& call : calls_of_rank_1) {
    const ncclUniqueId id = new_id();
    run_ranks(2, [&](int number) {
      const Rank rank(id, 2, number);
      const Buffer<float> value({1, 2, 3});
      if (number == 1) {
        call(rank, value);
      } else {
        ncclAllReduce(value.data(), value.data(), 2, ncclFloat, ncclSum, rank.communicator,
                      rank.stream);
      }
      std::this_thread::sleep_for(milliseconds(300));  // matching calls would have completed
      EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
      EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
      EXPECT_TRUE(rank.becomes_idle());
    });
  }
}

TEST_F(FakeNcclTest, ARecvOfAnotherSizeThanTheSendHangs) {
  const ncclUniqueId id = new_id();
  run_ranks(2, [&](int number) {
    const Rank rank(id, 2, number);
    const Buffer<float> values({1, 2, 3});
    if (number == 0) {
      ncclSend(values.data(), 2, ncclFloat, 1, rank.communicator, rank.stream);
      EXPECT_TRUE(rank.becomes_idle());
    } else {
      ncclRecv(values.data(), 3, ncclFloat, 0, rank.communicator, rank.stream);
      std::this_thread::sleep_for(milliseconds(300));  // a recv that fits ends sooner
      EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
    }
    EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
  });
}

TEST_F(FakeNcclTest, AnAbortCanBeMadeToWaitForTheDevice) {
  const syncbn::test::Environment waits("FAKE_NCCL_ABORT", "device");
  const ncclUniqueId first_id = new_id();
  const ncclUniqueId second_id = new_id();
  run_ranks(2, [&](int number) {
    const Rank first(first_id, 2, number);
    const Rank second(second_id, 2, number);
    const Buffer<float> value({1});
    if (number == 1) return;
    start_alone(first, value);
    start_alone(second, value);
    bool has_ended = false;
    std::thread aborting([&] {
      ncclCommAbort(first.communicator);
      has_ended = true;
    });
    std::this_thread::sleep_for(milliseconds(300));  // an abort that does not wait ends sooner
    EXPECT_FALSE(has_ended);
    ncclCommAbort(second.communicator);
    aborting.join();
  });
}

TEST_F(FakeNcclTest, TwoRanksOnOneGpuAreRefused) {
  const ncclUniqueId id = new_id();
  run_ranks(3, [&](int number) {
    cudaSetDevice(number == 2 ? 0 : number);
    ncclComm_t communicator = nullptr;
    EXPECT_EQ(ncclCommInitRank(&communicator, 3, id, number), ncclInvalidUsage);
    EXPECT_EQ(communicator, nullptr);
    EXPECT_THAT(ncclGetLastError(nullptr),
                HasSubstr("Duplicate GPU detected : rank 0 and rank 2 both on CUDA device"));
  });
}

TEST_F(FakeNcclTest, TheSameGpuOfTwoHostsIsTwoGpus) {
  const ncclUniqueId id = new_id();
  run_ranks(2, [&](int number) {
    const syncbn::test::Environment host("NCCL_HOSTID", std::to_string(number));
    const Rank rank(id, 2, number, 0);
    const Buffer<float> value({1});
    start_alone(rank, value);
    EXPECT_EQ(value.values(), std::vector<float>{2});
  });
}

TEST_F(FakeNcclTest, RefusesArgumentsWithNcclsWords) {
  run_ranks(1, [](int) {
    const Rank rank(new_id(), 1, 0);
    const Buffer<float> value({1});
    const auto expect = [](ncclResult_t result, ncclResult_t expected, const char* words) {
      EXPECT_EQ(result, expected);
      EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr(words));
    };
    const auto reduce = [&](const void* from, int type, int operation, ncclComm_t communicator) {
      return ncclAllReduce(from, value.data(), 1, static_cast<ncclDataType_t>(type),
                           static_cast<ncclRedOp_t>(operation), communicator, rank.stream);
    };
    expect(
        ncclBroadcast(value.data(), value.data(), 1, ncclFloat, 1, rank.communicator, rank.stream),
        ncclInvalidArgument, "Broadcast : invalid root 1 (root should be in the 0..1 range)");
    expect(ncclSend(value.data(), 1, ncclFloat, -1, rank.communicator, rank.stream),
           ncclInvalidArgument, "Send : invalid root -1");
    expect(reduce(value.data(), ncclNumTypes, ncclSum, rank.communicator), ncclInvalidArgument,
           "AllReduce : invalid type 12");
    expect(reduce(value.data(), ncclFloat, 17, rank.communicator), ncclInvalidArgument,
           "AllReduce : reduction operation 17 unknown to this communicator");
    expect(reduce(nullptr, ncclFloat, ncclSum, rank.communicator), ncclInvalidArgument,
           "AllReduce : sendbuff");
    expect(reduce(value.data(), ncclFloat, ncclSum, nullptr), ncclInvalidArgument,
           "AllReduce : comm argument is NULL");
    cudaSetDevice(1);
    const Buffer<float> elsewhere({1});
    expect(reduce(elsewhere.data(), ncclFloat, ncclSum, rank.communicator), ncclInvalidArgument,
           "AllReduce : sendbuff allocated on device 1 mismatchs with NCCL device 0");

    ncclComm_t communicator = nullptr;
    expect(ncclCommInitRank(&communicator, 2, new_id(), 2), ncclInvalidArgument,
           "Invalid rank requested : 2/2");
    ncclConfig_t config{};
    expect(ncclCommInitRankConfig(&communicator, 1, new_id(), 0, &config), ncclInvalidArgument,
           "not initialized via NCCL_CONFIG_INITIALIZER");
    config = NCCL_CONFIG_INITIALIZER;
    config.minCTAs = 5;
    config.maxCTAs = 4;
    expect(ncclCommInitRankConfig(&communicator, 1, new_id(), 0, &config), ncclInvalidArgument,
           "Invalid config min/max channels attribute value 5/4");
    expect(ncclGroupEnd(), ncclInvalidUsage, "not in a group call");
    EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
    expect(reduce(value.data(), ncclFloat, ncclSum, rank.communicator), ncclInvalidArgument,
           "corrupted comm object");
  });
}

TEST_F(FakeNcclTest, HasTheVersionOfTheHeader) {
  int version = 0;
  EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE);
}

}  // namespace
