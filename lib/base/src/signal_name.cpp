#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/signal_name.h>

#include <array>

namespace syncbn::base {

std::string signal_name(int signal) {
  // By number, from 1 on; the numbers of x86-64 and ARM.
  static constexpr std::array kNames = {
      "HUP",  "INT",  "QUIT", "ILL",    "TRAP",   "ABRT",  "BUS",  "FPE",  "KILL", "USR1", "SEGV",
      "USR2", "PIPE", "ALRM", "TERM",   "STKFLT", "CHLD",  "CONT", "STOP", "TSTP", "TTIN", "TTOU",
      "URG",  "XCPU", "XFSZ", "VTALRM", "PROF",   "WINCH", "POLL", "PWR",  "SYS"};
  static_assert(SIGSTKFLT == 16 && SIGSYS == 31 && kNames.size() == SIGSYS);
  if (signal < 1 || signal > SIGSYS) return fmt::format("signal {}", signal);
  return fmt::format("SIG{}", kNames[static_cast<size_t>(signal - 1)]);
}

}  // namespace syncbn::base
