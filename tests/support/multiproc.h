#pragma once

#include <functional>
#include <string>
#include <vector>

namespace syncbn::test {

/// The result of one forked rank.
struct RankResult {
  int rank = 0;
  int exit_code = -1;  ///< 128 + N when signal N ended it
  std::string output;  ///< stdout and stderr together
};

struct RunRanksOptions {
  int world_size = 2;
  double timeout_seconds = 200;  ///< after which all ranks are killed and the test fails
  /// Whether to set MASTER_ADDR and MASTER_PORT.
  bool set_master = true;
};

/// Forks `world_size` processes with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
/// and MASTER_PORT set, runs `body(rank)` in each and waits for all of them. A rank exits with 1 if
/// a GoogleTest assertion inside `body` failed. Call it before this process starts threads.
std::vector<RankResult> run_ranks_and_collect(const RunRanksOptions& options,
                                              const std::function<void(int rank)>& body);

/// Like run_ranks(), but fails the test, with the ranks' output, unless every rank succeeds.
void run_ranks(int world_size, const std::function<void(int rank)>& body,
               double timeout_seconds = 200);

/// A TCP port on 127.0.0.1 that no other program gets while this one runs, unless it asks for the
/// number with SO_REUSEADDR, as a TCPStore does.
int free_port();

}  // namespace syncbn::test
