#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <ios>
#include <nlohmann/json.hpp>

namespace syncbn::train {

/// Version of the log's lines; readers refuse higher ones. New keys do not need a new version.
inline constexpr int64_t kLogVersion = 1;
inline constexpr const char* kLogVersionKey = "format_version";

enum class ReadSteps { kNo, kYes };

/// @param start a line of the event "start", or null
/// @throws base::UserError if a newer version of train wrote the log.
void check_format(const std::filesystem::path& folder, const nlohmann::ordered_json& start);

/// The log.jsonl of a run's folder, readable while the run writes to it. Not thread-safe.
class RunLog {
 public:
  explicit RunLog(const std::filesystem::path& folder);

  /// Whether another file has replaced the one read so far: a run that resumes rewrites its log
  /// without the steps that it repeats. The next read() then starts at the first line.
  bool is_replaced();

  /// When the log was last written, in seconds since 1970, as of the last is_replaced().
  double changed() const { return changed_; }

  /// Number of lines that were not JSON objects, as a full disk may leave them.
  int64_t damaged() const { return damaged_; }

  /// Calls `take` for each line completed since the last call, except damaged lines and, with
  /// ReadSteps::kNo, lines about steps.
  void read(ReadSteps steps, const std::function<void(const nlohmann::ordered_json& line)>& take);

 private:
  std::filesystem::path path_;
  ino_t file_ = 0;
  double changed_ = 0;
  int64_t damaged_ = 0;
  std::streamoff read_ = 0;
};

}  // namespace syncbn::train
