#include "cuda_emulator/emulator.h"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <exception>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_EMULATOR_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_EMULATOR_ASAN
#endif
#endif
#ifdef CUDA_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// void cuda_emulator_switch(void** from, void* to): saves the registers that a call preserves,
// stores the stack pointer in *from and continues on the stack `to`. swapcontext() would make a
// system call each time.
asm(R"(
.text
.globl cuda_emulator_switch
.hidden cuda_emulator_switch
.type cuda_emulator_switch, @function
cuda_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulator_switch, .-cuda_emulator_switch
)");
extern "C" void cuda_emulator_switch(void** from, void* to);

namespace cuda_emulator {
namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = size_t{128} << 10;
constexpr uint64_t kCanary = 0xC0FFEE0DDBA11CAFu;
/// Average number of exchanges of a warp before another warp has its turn.
constexpr size_t kTurns = 16;
/// Number of blocks that take turns.
constexpr size_t kResident = 4;

void fiber_main();

/// A stack on which one kernel thread runs after another.
class Fiber {
 public:
  Fiber()
      : stack_(static_cast<char*>(::mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (stack_ == MAP_FAILED) throw std::bad_alloc();
    *reinterpret_cast<uint64_t*>(stack_) = kCanary;
    // What cuda_emulator_switch pops: six registers, then fiber_main as the return address.
    void** const top = reinterpret_cast<void**>(stack_ + kStack) - 8;
    top[6] = reinterpret_cast<void*>(&fiber_main);
    pointer_ = top;
  }
  ~Fiber() {
#ifdef CUDA_EMULATOR_ASAN
    ASAN_UNPOISON_MEMORY_REGION(stack_, kStack);
#endif
    ::munmap(stack_, kStack);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Runs the fiber until it calls leave().
  void enter() {
#ifdef CUDA_EMULATOR_ASAN
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack_, kStack);
#endif
    cuda_emulator_switch(&host_, pointer_);
#ifdef CUDA_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  void require_intact() const {
    if (*reinterpret_cast<const uint64_t*>(stack_) == kCanary) return;
    throw std::logic_error("a kernel needs more stack than the emulator has");
  }

  void leave() {
    void* fake_stack = nullptr;
#ifdef CUDA_EMULATOR_ASAN
    __sanitizer_start_switch_fiber(&fake_stack, host_stack_, host_size_);
#endif
    cuda_emulator_switch(&pointer_, host_);
    begin(fake_stack);
  }

  /// The fiber calls this first, and whenever it continues.
  void begin([[maybe_unused]] void* fake_stack = nullptr) {
#ifdef CUDA_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, &host_stack_, &host_size_);
#endif
  }

 private:
  char* const stack_;
  void* pointer_;         ///< stack pointer of the fiber while it does not run
  void* host_ = nullptr;  ///< stack pointer of its caller while it runs
#ifdef CUDA_EMULATOR_ASAN
  const void* host_stack_ = nullptr;
  size_t host_size_ = 0;
#endif
};

struct Block;

struct Warp {
  unsigned mask = 0, arrived = 0;  ///< of the exchange in progress
  unsigned turn = 0;               ///< completed exchanges
  /// The lanes' values in this exchange and the previous one, which slower lanes have yet to read.
  std::array<std::array<std::array<char, 8>, kWarp>, 2> brought = {};
};

struct Thread {
  enum class State { kReady, kAtWarp, kAtBlock, kDone };
  State state = State::kReady;
  uint3 index = {};
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  Fiber* fiber = nullptr;
};

struct Block {
  uint3 index = {};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  size_t live = 0, at_barrier = 0;
  std::unique_ptr<char[]> shared;
};

class Run;
thread_local Run* current_run = nullptr;
thread_local Thread* current = nullptr;

/// Kept for the next launch: creating fibers takes longer than most launches.
thread_local std::vector<std::unique_ptr<Fiber>> fibers;

class Run {
 public:
  Run(const Launch& launch, size_t shared_bytes, const std::function<void(void*)>& body)
      : launch_(launch), shared_bytes_(shared_bytes), body_(body), random_(launch.seed) {}

  void all_blocks() {
    const dim3& grid = launch_.grid;
    const uint64_t blocks = launch_.only ? 1 : static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    uint64_t begun = 0;
    std::array<std::unique_ptr<Block>, kResident> resident;
    for (;;) {
      for (size_t slot = 0; slot < kResident; ++slot) {
        if (!resident[slot] && begun < blocks) resident[slot] = make_block(begun++, slot);
      }
      bool ran = false;
      const size_t first = random_() % kResident;
      for (size_t i = 0; i < kResident && !ran; ++i) {
        std::unique_ptr<Block>& block = resident[(first + i) % kResident];
        if (!block) continue;
        ran = run_some_warp(*block);
        if (block->live == 0) block.reset();
      }
      if (ran) continue;
      for (const auto& block : resident) {
        if (block) throw_stuck(*block);
      }
      return;
    }
  }

  /// Runs on a fiber.
  void thread() {
    try {
      body_(current->block->shared.get());
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
    --current->block->live;
    switch_away(Thread::State::kDone);
  }

  void switch_away(Thread::State state) {
    Thread* const self = current;
    self->state = state;
    self->fiber->leave();
  }

  void wait_for_block() {
    Block& block = *current->block;
    if (++block.at_barrier < block.threads.size()) return switch_away(Thread::State::kAtBlock);
    block.at_barrier = 0;
    for (Thread& thread : block.threads) thread.state = Thread::State::kReady;
  }

  void exchange(unsigned mask, int source, void* value, size_t bytes) {
    Warp& warp = *current->warp;
    const int lane = current->lane;
    if ((mask >> lane & 1u) == 0 || (mask >> source & 1u) == 0) {
      throw std::logic_error("a lane that is not in its mask exchanges values");
    }
    auto& brought = warp.brought[warp.turn % 2];
    std::memcpy(brought[static_cast<size_t>(lane)].data(), value, bytes);
    arrive(warp, mask, lane);
    std::memcpy(value, brought[static_cast<size_t>(source)].data(), bytes);
  }

  unsigned ballot(unsigned mask, bool value) {
    Warp& warp = *current->warp;
    auto& brought = warp.brought[warp.turn % 2];
    brought[static_cast<size_t>(current->lane)][0] = value ? 1 : 0;
    arrive(warp, mask, current->lane);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1u) != 0 && brought[lane][0] != 0) bits |= 1u << lane;
    }
    return bits;
  }

  void pause() {
    if (random_() % 2 == 0) switch_away(Thread::State::kReady);
  }

 private:
  void arrive(Warp& warp, unsigned mask, int lane) {
    if (warp.arrived != 0 && warp.mask != mask) {
      throw std::logic_error("lanes of a warp exchange values with different masks");
    }
    warp.mask = mask;
    warp.arrived |= 1u << lane;
    if (warp.arrived != mask) return switch_away(Thread::State::kAtWarp);
    warp.arrived = 0;
    ++warp.turn;
    Thread* const lanes = current - lane;  // a block's threads are adjacent
    for (unsigned other = 0; other < kWarp; ++other) {
      if ((mask >> other & 1u) != 0) lanes[other].state = Thread::State::kReady;
    }
  }

  std::unique_ptr<Block> make_block(uint64_t number, size_t slot) {
    auto block = std::make_unique<Block>();
    const dim3& grid = launch_.grid;
    block->index = launch_.only.value_or(uint3{static_cast<unsigned>(number % grid.x),
                                               static_cast<unsigned>(number / grid.x % grid.y),
                                               static_cast<unsigned>(number / grid.x / grid.y)});
    const size_t threads = static_cast<size_t>(launch_.block.x) * launch_.block.y * launch_.block.z;
    while (fibers.size() < (slot + 1) * threads) fibers.push_back(std::make_unique<Fiber>());
    block->shared = std::make_unique<char[]>(shared_bytes_);
    std::memset(block->shared.get(), 0xFF, shared_bytes_);
    block->live = threads;
    block->warps.resize((threads + kWarp - 1) / kWarp);
    block->threads.resize(threads);
    for (size_t i = 0; i < threads; ++i) {
      Thread& thread = block->threads[i];
      const auto linear = static_cast<unsigned>(i);
      thread.index = {linear % launch_.block.x, linear / launch_.block.x % launch_.block.y,
                      linear / launch_.block.x / launch_.block.y};
      thread.lane = static_cast<int>(i % kWarp);
      thread.warp = &block->warps[i / kWarp];
      thread.block = block.get();
      thread.fiber = fibers[slot * threads + i].get();
    }
    return block;
  }

  /// Runs a random warp for a random number of turns.
  bool run_some_warp(Block& block) {
    const size_t first = random_() % block.warps.size();
    for (size_t i = 0; i < block.warps.size(); ++i) {
      const size_t warp = (first + i) % block.warps.size();
      if (!run_warp(block, warp)) continue;
      // Short turns would move the stacks of all warps through the processor's caches.
      while (random_() % kTurns != 0 && run_warp(block, warp)) {
      }
      return true;
    }
    return false;
  }
  /// Runs the warp's ready threads, beginning with a random one.
  bool run_warp(Block& block, size_t warp) {
    const size_t begin = warp * kWarp;
    const size_t lanes = std::min(block.threads.size() - begin, size_t{kWarp});
    const size_t first = random_() % lanes;
    bool ran = false;
    for (size_t i = 0; i < lanes; ++i) {
      Thread& thread = block.threads[begin + (first + i) % lanes];
      if (thread.state != Thread::State::kReady) continue;
      run_thread(thread);
      ran = true;
    }
    return ran;
  }
  void run_thread(Thread& thread) {
    current = &thread;
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    thread.fiber->enter();
    if (thread.state == Thread::State::kDone) thread.fiber->require_intact();
    current = nullptr;
    if (error_) std::rethrow_exception(error_);
  }

  [[noreturn]] static void throw_stuck(const Block& block) {
    size_t at_warp = 0;
    for (const Thread& thread : block.threads) {
      at_warp += thread.state == Thread::State::kAtWarp ? 1 : 0;
    }
    throw std::logic_error("block (" + std::to_string(block.index.x) + ", " +
                           std::to_string(block.index.y) + ") is stuck: of its " +
                           std::to_string(block.threads.size()) + " threads " +
                           std::to_string(block.at_barrier) + " wait for the block, " +
                           std::to_string(at_warp) + " for their warp, and " +
                           std::to_string(block.threads.size() - block.live) + " have returned");
  }

  const Launch launch_;
  const size_t shared_bytes_;
  const std::function<void(void*)>& body_;
  std::mt19937_64 random_;
  std::exception_ptr error_;
};

void fiber_main() {
  current->fiber->begin();
  for (;;) current_run->thread();
}

}  // namespace

void wait_for_block() {
  current_run->wait_for_block();
}
void pause() {
  current_run->pause();
}
void exchange(unsigned mask, int source, void* value, size_t bytes) {
  current_run->exchange(mask, source, value, bytes);
}
unsigned ballot(unsigned mask, bool value) {
  return current_run->ballot(mask, value);
}
int lane() {
  return current->lane;
}

void run(const Launch& launch, size_t shared_bytes, const std::function<void(void*)>& body) {
  blockDim = launch.block;
  gridDim = launch.grid;
  Run run(launch, shared_bytes, body);
  current_run = &run;
  try {
    run.all_blocks();
  } catch (...) {
    // Fibers that have not ended cannot start again: release their stacks.
    fibers.clear();
    throw;
  }
}

}  // namespace cuda_emulator
