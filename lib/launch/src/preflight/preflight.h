#pragma once

#include <syncbn/launch/options.h>

#include <string>

namespace syncbn::launch {

/// The first argument of a launcher that runs as a worker of --preflight.
inline constexpr const char* kPreflightWorker = "--preflight-of-node";

/// The job that checks the machines before the job that `options` describe: on the same nodes, with
/// this program as its workers.
/// @throws base::UserError as parse_options() does.
LaunchOptions preflight_job(const LaunchOptions& options);

/// Runs as a worker of that job. Local rank 0 of each node measures; node 0 prints what all nodes
/// have found, to stdout. @param folder in which the disk is measured.
/// @return the exit code: 75 on node 0 if the job would fail.
int run_preflight_worker(const std::string& folder);

}  // namespace syncbn::launch
