#pragma once

#include <syncbn/base/unique_fd.h>

#include <string>

namespace syncbn::base {

/// The environment variable that tells a worker the number of the descriptor from share_secret().
inline constexpr const char* kSecretDescriptor = "SYNCBN_SECRET_FD";

/// A memfd with the secret of a job's workers. They inherit it from their launcher, so that the
/// secret appears neither in an environment nor on a command line. Invalid if the system cannot
/// make one.
/// @param secret 64 hexadecimal digits.
UniqueFd share_secret(const std::string& secret);

/// The secret that this process's launcher shares with all workers of the attempt; empty if there
/// is none. The first call reads it and closes the descriptor, so that programs that this process
/// starts do not inherit it. Thread-safe.
const std::string& job_secret();

}  // namespace syncbn::base
