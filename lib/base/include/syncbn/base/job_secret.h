#pragma once

#include <syncbn/base/unique_fd.h>

#include <string>

namespace syncbn::base {

/// The variable that holds the number of the descriptor from share_secret(), for a worker.
inline constexpr const char* kSecretDescriptor = "SYNCBN_SECRET_FD";

/// Memory with the secret of a job's workers: they inherit it from their launcher, so the secret is
/// neither in an environment nor in a command line. Empty if the system has none.
/// @param secret 64 hexadecimal digits.
UniqueFd share_secret(const std::string& secret);

/// The secret that this process's launcher has shared with all workers of the attempt; empty if it
/// has none. The first call reads it and closes the descriptor, so that the programs that this
/// process starts do not inherit it. Thread-safe.
const std::string& job_secret();

}  // namespace syncbn::base
