#pragma once

// Brings the whole logging vocabulary: spdlog::info("epoch {}", n), warn, error, debug.
#include <spdlog/spdlog.h>

#include <functional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Sends spdlog's default logger to stderr in the one form that all programs here use.
/// Level from SYNCBN_LOG (trace|debug|info|warn|error|off), `info` when unset. Ranks other than 0
/// log warnings and worse only: the launcher's prefix names the rank.
void init_logging(int rank = 0);

/// Writes to stdout. run_main() reports what cannot be written.
void write_stdout(std::string_view text) noexcept;

/// Writes to stderr and ignores errors.
void write_stderr(std::string_view text) noexcept;

/// The body of every main(): runs `body`, and turns an escaping error into one message on stderr
/// ("<program>: error: <what>") and its documented exit code.
int run_main(const std::string& program, const std::function<int()>& body);

}  // namespace syncbn::base
