#include "commands/commands.h"

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/train/config.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <thread>

#include "commands/program_options.h"
#include "profile/profile_files.h"
#include "profile/summary.h"
#include "records/folder_lock.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUsualSteps = "3";
// Grace period for a restart by the launcher, during which no process holds the run's folder.
constexpr std::chrono::seconds kRestartTime{15};

std::atomic<int> g_interrupted{0};

/// The time of the file's last change; nothing without the file.
std::optional<fs::file_time_type> changed(const fs::path& file) {
  std::error_code error;
  const auto time = fs::last_write_time(file, error);
  return error ? std::nullopt : std::optional(time);
}

/// The file that asks a run for a profile. Removes it if the command ends first.
class ProfileRequest {
 public:
  ProfileRequest(fs::path file, int64_t steps) : file_(std::move(file)) {
    // Handlers first: without one, a signal would end this process and leave the request behind.
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      ::signal(signal, [](int received) { g_interrupted = received; });
    }
    base::write_file_atomically(file_, std::to_string(steps));
  }
  ~ProfileRequest() {
    std::error_code ignored;
    fs::remove(file_, ignored);
  }
  ProfileRequest(const ProfileRequest&) = delete;
  ProfileRequest& operator=(const ProfileRequest&) = delete;

  bool is_pending() const { return base::exists(file_); }

 private:
  const fs::path file_;
};

}  // namespace

int profile_command(const std::vector<std::string>& args) {
  if (args.empty() || args[0].empty() || args[0].starts_with('-')) {
    throw base::UserError("profile: name the folder of a run first: train profile runs/NAME");
  }
  const fs::path run = args[0];
  config::Faults faults;
  const auto line = parse_arguments("profile", {args.begin() + 1, args.end()}, faults);
  const std::string wanted = line.value("steps").value_or(kUsualSteps);
  const int64_t steps = base::parse_number<int64_t>(wanted).value_or(0);
  if (steps < 1 || steps > ProfileConfig::kMaxSteps) {
    faults.add({}, fmt::format("--steps: must be from 1 to {}, got '{}'", ProfileConfig::kMaxSteps,
                               wanted));
  }
  faults.throw_if_any();
  if (!is_locked(run)) {
    throw base::UserError(
        fmt::format("profile: no run is training in {}; the key profile of its "
                    "configuration profiles a run from its start",
                    run.string()));
  }
  const ProfileFiles files(run);
  const auto former = changed(files.summary());
  {
    const ProfileRequest request(files.request(), steps);
    auto seen = std::chrono::steady_clock::now();
    while (request.is_pending()) {
      if (g_interrupted != 0) return base::kExitSignalBase + g_interrupted;
      const auto now = std::chrono::steady_clock::now();
      if (is_locked(run)) seen = now;
      if (now - seen > kRestartTime) {
        throw base::UnavailableError(
            fmt::format("profile: the run in {} has ended before it was profiled", run.string()));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  if (changed(files.summary()) == former) {
    throw base::UnavailableError(
        fmt::format("profile: the run in {} could not write its profile; its own messages say why",
                    run.string()));
  }
  const auto summary = nlohmann::ordered_json::parse(base::read_file(files.summary()));
  for (const std::string& text : table_of(summary)) base::write_stdout(text + "\n");
  if (summary.contains("trace")) {
    base::write_stdout(fmt::format("{} opens at https://ui.perfetto.dev\n",
                                   (run / summary["trace"].get<std::string>()).string()));
  }
  return base::kExitOk;
}

}  // namespace syncbn::train
