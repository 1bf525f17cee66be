#include "preflight/gpu_check.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "common/descriptors.h"
#include "common/processes.h"

namespace syncbn::launch {
namespace {

constexpr int kMaxGpus = 64;

// From cuda.h of the CUDA toolkit, which the launcher's build does not require.
constexpr int kCudaSuccess = 0;
constexpr int kCudaNoDevice = 100;
constexpr int kCudaNotFound = 500;

// A GPU's results: the child writes them, its parent reads them.
struct Slot {
  std::atomic<const char*> function;  // the driver's function that was called last
  std::atomic<bool> is_done;
  std::array<char, 96> model;
  std::array<char, 32> address;
  size_t memory;
  double memory_rate;
  std::array<char, 160> error;
};

struct Board {
  std::atomic<int> gpus;
  std::array<Slot, kMaxGpus> slots;
};

struct DriverError {
  int status;
};

// The driver's functions, called for one GPU.
class Driver {
 public:
  Driver(void* library, Slot& slot) : library_(library), slot_(slot) {}

  // @throws DriverError
  template <class... Args>
  void call(const char* name, Args... args) const {
    slot_.function = name;
    auto* const function = reinterpret_cast<int (*)(Args...)>(::dlsym(library_, name));
    const int status = function == nullptr ? kCudaNotFound : function(args...);
    if (status != kCudaSuccess) throw DriverError{status};
  }

  void note(const DriverError& error) const {
    using GetName = int (*)(int, const char**);
    auto* const get_name = reinterpret_cast<GetName>(::dlsym(library_, "cuGetErrorName"));
    const char* name = nullptr;
    if (get_name == nullptr || get_name(error.status, &name) != kCudaSuccess) name = "error";
    fmt::format_to_n(slot_.error.data(), slot_.error.size() - 1, "{}: {} ({})",
                     slot_.function.load(), name, error.status);
  }

 private:
  void* library_;
  Slot& slot_;
};

void measure(const Driver& driver, int index, Slot& slot) {
  int device = 0;
  void* context = nullptr;
  driver.call("cuDeviceGet", &device, index);
  driver.call("cuDeviceGetName", slot.model.data(), static_cast<int>(slot.model.size()), device);
  driver.call("cuDeviceGetPCIBusId", slot.address.data(), static_cast<int>(slot.address.size()),
              device);
  driver.call("cuDeviceTotalMem_v2", &slot.memory, device);
  driver.call("cuDevicePrimaryCtxRetain", &context, device);
  driver.call("cuCtxSetCurrent", context);

  constexpr size_t kMaxCopy = size_t{256} << 20;  // more than the caches hold
  constexpr size_t kPart = 16;                    // a copy takes at most 1/kPart of the memory
  const size_t size = std::min(kMaxCopy, slot.memory / kPart);
  unsigned long long from = 0;
  unsigned long long to = 0;
  driver.call("cuMemAlloc_v2", &from, size);
  driver.call("cuMemAlloc_v2", &to, size);
  // The best rate, because a GPU needs a while to raise its clock.
  constexpr double kSeconds = 0.3;
  constexpr int kCopies = 8;
  for (const auto begin = Clock::now(); base::seconds_since(begin) < kSeconds;) {
    const auto run_begin = Clock::now();
    for (int i = 0; i < kCopies; ++i) driver.call("cuMemcpyDtoD_v2", to, from, size);
    driver.call("cuCtxSynchronize");
    const double rate = 2.0 * kCopies * static_cast<double>(size) / base::seconds_since(run_begin);
    slot.memory_rate = std::max(slot.memory_rate, rate);
  }
}

// A process that measures one GPU. As in a job, each GPU has its own process: one that hangs or
// crashes does not affect the others.
class Child {
 public:
  Child(Board& board, int gpu) : slot_(board.slots.at(static_cast<size_t>(gpu))) {
    Pipe pipe = Pipe::make();
    slot_.function = "dlopen";
    pid_ = ::fork();
    if (pid_ < 0) base::throw_errno("cannot start the check of a GPU");
    if (pid_ == 0) {
      run(board, gpu, pipe.writer.get());
      ::_exit(0);  // the driver's own destructors may hang
    }
    lifeline_ = std::move(pipe.reader);
  }

  // Returns when the number of GPUs is known, or the process has ended.
  void wait_for_count(Clock::time_point deadline) const {
    base::poll_until(lifeline_.get(), POLLIN, deadline);
  }

  GpuFigures wait(Clock::time_point deadline, std::chrono::milliseconds patience) {
    bool has_ended = false;
    for (char byte = 0; !has_ended && base::poll_until(lifeline_.get(), POLLIN, deadline);) {
      has_ended = ::read(lifeline_.get(), &byte, 1) == 0;
    }
    // A process that hangs in the kernel cannot be killed: do not wait for it.
    if (!has_ended) ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, has_ended ? 0 : WNOHANG);
    GpuFigures figures{.model = slot_.model.data(),
                       .address = slot_.address.data(),
                       .memory = slot_.memory,
                       .memory_rate = slot_.memory_rate,
                       .error = slot_.error.data()};
    if (!slot_.is_done) {
      const double seconds = std::chrono::duration<double>(patience).count();
      figures.error = fmt::format(
          "{} {}", slot_.function.load(),
          has_ended
              ? fmt::format("ended the process that measures: {}", ExitStatus{status}.in_words())
              : fmt::format("did not return within {}", base::format_seconds(seconds)));
    }
    return figures;
  }

 private:
  void run(Board& board, int gpu, int counted) {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      fmt::format_to_n(slot_.error.data(), slot_.error.size() - 1, "dlopen: {}", ::dlerror());
    } else {
      const Driver driver(library, slot_);
      try {
        int gpus = 0;
        driver.call("cuInit", 0U);
        driver.call("cuDeviceGetCount", &gpus);
        if (gpu == 0) {
          board.gpus = std::min(gpus, kMaxGpus);
          [[maybe_unused]] const ssize_t written = ::write(counted, "", 1);
        }
        if (gpu < gpus) measure(driver, gpu, slot_);
      } catch (const DriverError& error) {
        if (error.status != kCudaNoDevice) driver.note(error);
      }
    }
    slot_.is_done = true;
  }

  Slot& slot_;
  pid_t pid_ = -1;
  base::UniqueFd lifeline_;
};

}  // namespace

std::vector<GpuFigures> measure_gpus(std::optional<int> listed,
                                     std::chrono::milliseconds patience) {
  if (listed == 0) return {};
  void* const memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) base::throw_errno("cannot share memory with the check of the GPUs");
  const auto unmap = [](Board* board) { ::munmap(board, sizeof(Board)); };
  const std::unique_ptr<Board, decltype(unmap)> board(new (memory) Board{}, unmap);
  const auto deadline = Clock::now() + patience;
  std::vector<Child> children;
  children.emplace_back(*board, 0);
  children[0].wait_for_count(deadline);
  const int count = board->gpus;
  for (int gpu = 1; gpu < count; ++gpu) children.emplace_back(*board, gpu);
  std::vector<GpuFigures> gpus;
  gpus.reserve(children.size());
  for (Child& child : children) gpus.push_back(child.wait(deadline, patience));
  // A machine without a GPU may have the driver's library, whose cuInit fails there.
  const bool matters = !board->slots[0].is_done || listed.value_or(0) > 0;
  if (count == 0 && (gpus[0].error.empty() || !matters)) gpus.clear();
  return gpus;
}

}  // namespace syncbn::launch
