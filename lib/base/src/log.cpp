#include <syncbn/base/log.h>

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <new>
#include <string_view>
#include <system_error>

namespace syncbn::base {
namespace {

using StderrSink = spdlog::sinks::stderr_color_sink_mt;

std::string message_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "there is not enough memory";
  const std::string what = error.what();
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) {
    const int code = system->code().value();
    // std::thread's exception does not say that a thread could not start.
    return (code == EAGAIN ? "cannot start a thread: " : "") + what + limit_advice(code);
  }
  // libtorch appends a page of stack frames.
  return what.substr(0, what.find("\nException raised from"));
}

// errno of a failed write: stdio drops the text, and a later fflush() succeeds.
std::atomic<int> g_stdout_error{0};

}  // namespace

void init_logging(int rank) {
  const auto colours = env("NO_COLOR") ? spdlog::color_mode::never : spdlog::color_mode::automatic;
  // spdlog's factories refuse a name in use, and "" is the name of the default logger, which this
  // one replaces.
  auto logger = std::make_shared<spdlog::logger>("", std::make_shared<StderrSink>(colours));
  logger->set_pattern("%^%L%$ %v");
  logger->set_level(rank == 0 ? spdlog::level::info : spdlog::level::warn);
  if (const auto wanted = env("SYNCBN_LOG")) {
    const auto level = spdlog::level::from_str(*wanted);
    // from_str returns `off` for unknown names.
    if (level == spdlog::level::off && *wanted != "off") {
      throw UserError(fmt::format(
          "environment variable SYNCBN_LOG={} is not one of trace, debug, info, warn, error, off",
          *wanted));
    }
    logger->set_level(level);
  }
  spdlog::set_default_logger(std::move(logger));
}

void set_log_colours(bool wanted) {
  for (const auto& sink : spdlog::default_logger_raw()->sinks()) {
    auto* const ours = dynamic_cast<StderrSink*>(sink.get());
    if (ours == nullptr) continue;
    ours->set_color_mode(wanted ? spdlog::color_mode::always : spdlog::color_mode::never);
  }
}

void write_stdout(std::string_view text) noexcept {
  if (std::fwrite(text.data(), 1, text.size(), stdout) < text.size()) g_stdout_error = errno;
}

void write_stderr(std::string_view text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

int run_main(const std::string& program, const std::function<int()>& body) {
  // A worker's stdout is a pipe: fully buffered, its last lines would be late, and lost in a crash.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const int exit_code = body();
    // stdio flushes after main() as well, but then ignores a full disk.
    if (std::fflush(stdout) != 0) g_stdout_error = errno;
    if (g_stdout_error != 0) {
      throw UnavailableError("cannot write standard output: " + describe_errno(g_stdout_error));
    }
    if (std::ferror(stdout) != 0) throw UnavailableError("cannot write all of standard output");
    return exit_code;
  } catch (const std::exception& error) {
    const int exit_code = exit_code_of(error);
    const bool is_ours = dynamic_cast<const InternalError*>(&error) != nullptr;
    const char* const kind = is_ours                      ? "internal error"
                             : exit_code == kExitInternal ? "uncaught exception"
                                                          : "error";
    write_stderr(fmt::format("{}: {}: {}\n", program, kind, printable(message_of(error), "\n\t")));
    if (is_ours) write_stderr(fmt::format("{}: this is a bug; please report it\n", program));
    return exit_code;
  } catch (...) {
    write_stderr(
        fmt::format("{}: uncaught exception: it does not derive from std::exception\n", program));
    return kExitInternal;
  }
}

}  // namespace syncbn::base
