#include "output/last_output.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <chrono>
#include <vector>

namespace syncbn::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kReaderPatience{1};

}  // namespace

void write_report(Output& output, const std::string& file, const std::string& json) {
  if (file.empty()) return;
  try {
    base::write_file_atomically(file, json);
  } catch (const base::Error& error) {
    output.say(fmt::format("syncbn-launch: --report: {}", error.what()));
  }
}

int wait_for_reader(Output& output, Signals& signals, int exit_code, bool hurried) {
  const auto patience = Clock::now() + kReaderPatience;
  for (;;) {
    output.flush();
    std::vector<pollfd> polls{{signals.fd(), POLLIN, 0}};
    for (const int fd : output.waits_for()) polls.push_back({fd, POLLOUT, 0});
    const bool all_written = polls.size() == 1;
    if (all_written || (hurried && Clock::now() >= patience)) break;
    ::poll(polls.data(), polls.size(),
           hurried ? static_cast<int>(kReaderPatience / std::chrono::milliseconds(1)) : -1);
    while (const auto signal = signals.next()) {
      if (*signal == SIGTSTP) Signals::stop_self();
      if (!signals.ends(*signal)) continue;
      return exit_code != base::kExitOk ? exit_code : base::kExitSignalBase + *signal;
    }
  }
  const auto error = output.error();
  if (!error) return exit_code;
  output.say(fmt::format("syncbn-launch: error: {}; what the workers wrote there is lost", *error));
  return exit_code != base::kExitOk ? exit_code : base::kExitUnavailable;
}

}  // namespace syncbn::launch
