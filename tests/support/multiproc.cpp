#include "support/multiproc.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>

#include "support/listener.h"

namespace at {
/// libtorch's, if the test program links libtorch.
__attribute__((weak)) void set_num_threads(int threads);
}  // namespace at

namespace syncbn::test {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void run_child(int rank, const RunRanksOptions& options, int port,
                            const std::function<void(int)>& body) {
  const auto set = [](const char* name, int value) {
    ::setenv(name, std::to_string(value).c_str(), 1);
  };
  set("RANK", rank);
  set("LOCAL_RANK", rank);
  set("WORLD_SIZE", options.world_size);
  set("LOCAL_WORLD_SIZE", options.world_size);
  // Ranks share the machine's few cores. One thread per rank also makes results repeatable.
  ::setenv("OMP_NUM_THREADS", "1", 1);
  if (at::set_num_threads != nullptr) at::set_num_threads(1);  // it read the variable when loaded
  if (options.set_master) {
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    set("MASTER_PORT", port);
  }
  int code = 0;
  try {
    body(rank);
    code = ::testing::Test::HasFailure() ? 1 : 0;
  } catch (const base::Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    code = error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: unexpected exception: %s\n", rank, error.what());
    code = 1;
  }
  std::fflush(nullptr);
  // Not exit(): static destructors belong to the parent. Not _exit(): it would skip the handlers by
  // which a rank leaves its group in order.
  std::quick_exit(code);
}

}  // namespace

int free_port() {
  // The kernel assigns these ports to no other process until this program ends.
  static std::vector<BoundPort> held;
  return held.emplace_back().port;
}

std::vector<RankResult> run_ranks_and_collect(const RunRanksOptions& options,
                                              const std::function<void(int rank)>& body) {
  // A forked child has only the forking thread, and would hang on locks that other threads hold.
  const auto threads = std::filesystem::directory_iterator("/proc/self/task");
  if (std::distance(begin(threads), end(threads)) != 1) {
    throw base::InternalError("a test forks ranks after its own process started threads");
  }
  // The kernel assigns this port to no other process, but a socket with SO_REUSEADDR, such as
  // TCPStore's, can listen on it.
  const BoundPort held;
  const auto n = static_cast<size_t>(options.world_size);
  std::vector<pid_t> pids;
  std::vector<base::UniqueFd> outputs;
  std::fflush(nullptr);
  for (size_t rank = 0; rank < n; ++rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) base::throw_errno("pipe");
    base::UniqueFd reader(ends[0]);
    base::UniqueFd writer(ends[1]);
    const pid_t pid = ::fork();
    if (pid < 0) base::throw_errno("fork");
    if (pid == 0) {
      ::dup2(writer.get(), STDOUT_FILENO);
      ::dup2(writer.get(), STDERR_FILENO);
      writer.reset();
      reader.reset();
      outputs.clear();
      run_child(static_cast<int>(rank), options, held.port, body);
    }
    pids.push_back(pid);
    outputs.push_back(std::move(reader));
  }

  std::vector<RankResult> results(n);
  const auto deadline = Clock::now() + std::chrono::duration<double>(options.timeout_seconds);
  bool killed = false;
  size_t open = n;
  while (open > 0) {
    if (!killed && Clock::now() > deadline) {
      ADD_FAILURE() << "ranks still running after " << options.timeout_seconds << " s: killed";
      for (const pid_t pid : pids) ::kill(pid, SIGKILL);
      killed = true;
    }
    std::vector<pollfd> polls;
    polls.reserve(outputs.size());
    for (const auto& output : outputs) polls.push_back({output.get(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), 100);
    for (size_t i = 0; i < n; ++i) {
      if (!outputs[i] || polls[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t got = ::read(outputs[i].get(), buffer, sizeof(buffer));
      if (got > 0) {
        results[i].output.append(buffer, static_cast<size_t>(got));
      } else {
        outputs[i].reset();
        --open;
      }
    }
  }
  for (size_t i = 0; i < n; ++i) {
    int status = 0;
    ::waitpid(pids[i], &status, 0);
    results[i].rank = static_cast<int>(i);
    results[i].exit_code =
        WIFEXITED(status) ? WEXITSTATUS(status) : base::kExitSignalBase + WTERMSIG(status);
  }
  return results;
}

void run_ranks(int world_size, const std::function<void(int rank)>& body, double timeout_seconds) {
  const auto results =
      run_ranks_and_collect({.world_size = world_size, .timeout_seconds = timeout_seconds}, body);
  for (const RankResult& result : results) {
    EXPECT_EQ(result.exit_code, 0) << "rank " << result.rank << " said:\n" << result.output;
  }
}

}  // namespace syncbn::test
