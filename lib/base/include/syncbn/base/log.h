#pragma once

// For logging: spdlog::info("epoch {}", n), warn, error, debug.
#include <spdlog/spdlog.h>

#include <functional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Makes spdlog's default logger write to stderr in the format of all programs of this project.
/// Level from SYNCBN_LOG (trace|debug|info|warn|error|off), else `info` on rank 0 and `warn` on the
/// others. The launcher's prefix names the rank. On a terminal in colours, unless NO_COLOR is set.
void init_logging(int rank = 0);

/// Has init_logging()'s logger use colours, or none, whatever it writes to.
void set_log_colours(bool wanted);

/// Writes to stdout. run_main() reports a failure.
void write_stdout(std::string_view text) noexcept;

/// Writes to stderr. Ignores failures, which could not be reported.
void write_stderr(std::string_view text) noexcept;

/// The body of every main(): runs `body`. Reports an uncaught exception on stderr
/// ("<program>: error: <what>") and returns its exit code, see exit_code_of(). Lines of stdout are
/// written at once, also to a pipe.
int run_main(const std::string& program, const std::function<int()>& body);

}  // namespace syncbn::base
