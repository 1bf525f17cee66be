#pragma once

// For logging: spdlog::info("epoch {}", n), warn, error, debug.
#include <spdlog/spdlog.h>

#include <functional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Makes spdlog's default logger write to stderr in the format of all programs of this project.
/// SYNCBN_LOG (trace|debug|info|warn|error|off) sets the level; the default is `info` on rank 0 and
/// `warn` on the others. Lines do not name the rank: the launcher's prefix does. Uses colours on a
/// terminal, unless NO_COLOR is set.
/// @throws UserError if SYNCBN_LOG is none of these.
void init_logging(int rank = 0);

/// Switches the colours of init_logging()'s logger on or off, whether or not stderr is a terminal.
void set_log_colours(bool wanted);

/// Writes to stdout. run_main() reports failures.
void write_stdout(std::string_view text) noexcept;

/// Writes to stderr. Ignores failures, which could not be reported.
void write_stderr(std::string_view text) noexcept;

/// The body of every main(): runs `body`. Reports an uncaught exception on stderr
/// ("<program>: error: <what>") and returns its exit code, see exit_code_of(). Makes stdout
/// line-buffered, even if it is a pipe.
int run_main(const std::string& program, const std::function<int()>& body);

}  // namespace syncbn::base
