#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <syncbn/dist/process_group.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "support/multiproc.h"

namespace syncbn::test {

inline bool may_make_namespaces() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWNS | CLONE_NEWPID) == 0 ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0;
}

/// Runs ranks of the default group in processes that see no other ones. This process must be the
/// first of a PID namespace.
inline int run_host(int first, int ranks, const std::function<void(int rank)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 1;
  if (::mount("proc", "/proc", "proc", 0, nullptr) != 0) return 1;
  for (int rank = first; rank < first + ranks; ++rank) {
    if (::fork() != 0) continue;
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    dist::init_process_group();
    body(rank);
    std::quick_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int failures = 0;
  int status = 0;
  while (::wait(&status) > 0) failures += status == 0 ? 0 : 1;
  return failures;
}

/// Like run_group(), with consecutive ranks on hosts, which are PID namespaces: ranks of different
/// hosts cannot share memory. Requires may_make_namespaces().
/// @param hosts number of ranks on each host
inline void run_ranks_on_hosts(const std::vector<int>& hosts,
                               const std::function<void(int rank)>& body,
                               double timeout_seconds = 50) {
  std::vector<int> host_sizes;  // by rank: 0 unless it is the first of its host, which starts them
  for (const int size : hosts) {
    host_sizes.push_back(size);
    host_sizes.resize(host_sizes.size() + static_cast<size_t>(size) - 1);
  }
  const auto start_host = [&](int rank) {
    const int size = host_sizes[static_cast<size_t>(rank)];
    if (size == 0) return;
    ASSERT_EQ(::unshare(CLONE_NEWPID | CLONE_NEWNS), 0);
    const pid_t first = ::fork();  // the namespace ends with this process
    if (first == 0) std::quick_exit(run_host(rank, size, body));
    int status = 0;
    ASSERT_EQ(::waitpid(first, &status, 0), first);
    EXPECT_EQ(status, 0);
  };
  run_ranks(static_cast<int>(host_sizes.size()), start_host, timeout_seconds);
}

}  // namespace syncbn::test
