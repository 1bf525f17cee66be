#include <dlfcn.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/train/command.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "common/rank_0.h"

namespace {

using namespace syncbn;

std::atomic<pid_t> g_running{0};  ///< the process that trains

[[noreturn]] void end_process(int status) {
  for (;;) ::syscall(SYS_exit_group, status);
}

/// A plug-in or a library may call exit(0) in the middle of a run, which would count as finished.
/// Reports the call and ends the process at once: destructors would run while other threads train.
void refuse_success(const char* function, int status) {
  if ((status & 0xff) != 0 || g_running != ::getpid()) return;  // what wait() reports
  if (train::reports_plugin()) {
    base::write_stderr(
        fmt::format("train: error: a plug-in or a library called {}({}) before the run was over; "
                    "it must return, or throw an exception\n",
                    function, status));
  }
  end_process(base::kExitInternal);
}

/// Looks the function up at each call: a library may call exit() before this program's globals are
/// initialised.
void call_libc(const char* function, int status) {
  reinterpret_cast<void (*)(int)>(::dlsym(RTLD_NEXT, function))(status);
}

}  // namespace

// Plug-ins and libraries call these instead of libc's, since a program's symbols come first
// (exported_symbols.txt). Handlers of atexit() would run too late, and _exit() runs none.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {

void exit(int status) noexcept {
  refuse_success("exit", status);
  call_libc("exit", status);
  __builtin_unreachable();
}

void quick_exit(int status) noexcept {
  refuse_success("quick_exit", status);
  call_libc("quick_exit", status);
  __builtin_unreachable();
}

void _exit(int status) {
  refuse_success("_exit", status);
  end_process(status);
}

void _Exit(int status) noexcept {
  refuse_success("_Exit", status);
  end_process(status);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)

int main(int argc, char** argv) {
  // The name in top, pgrep and messages: users start bin/train.
  static char name[] = "train";
  ::prctl(PR_SET_NAME, name);
  program_invocation_short_name = name;
  g_running = ::getpid();
  const int exit_code = train::run_main(argc, argv);
  g_running = 0;
  return exit_code;
}
