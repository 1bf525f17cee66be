#pragma once

#include <functional>
#include <string>
#include <vector>

namespace syncbn::test {

/// What became of one forked rank.
struct RankResult {
  int rank = 0;
  int exit_code = -1;  ///< 128 + N when signal N ended it
  std::string output;  ///< stdout and stderr together
};

struct RunRanksOptions {
  int world_size = 2;
  double timeout_seconds = 50;  ///< then all ranks are killed and the test fails
  /// Sets MASTER_ADDR and MASTER_PORT as well; false leaves the environment to the test.
  bool set_master = true;
};

/// Forks `world_size` processes with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
/// and MASTER_PORT set, runs `body(rank)` in each and waits for all of them. GoogleTest
/// assertions inside `body` count: a rank in which one failed exits with 1.
/// Call it before the test's own process starts threads.
std::vector<RankResult> run_ranks_and_collect(const RunRanksOptions& options,
                                              const std::function<void(int rank)>& body);

/// The same, and every rank must succeed: otherwise the test fails with the ranks' output.
void run_ranks(int world_size, const std::function<void(int rank)>& body,
               double timeout_seconds = 50);

/// A TCP port on 127.0.0.1 that was free a moment ago.
int free_port();

}  // namespace syncbn::test
