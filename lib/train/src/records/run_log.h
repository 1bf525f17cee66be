#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <ios>
#include <nlohmann/json.hpp>
#include <string>

namespace syncbn::train {

/// Of the log's lines: readers refuse higher ones. Lines may get further keys without another
/// version.
inline constexpr int64_t kLogVersion = 1;
inline constexpr const char* kLogVersionKey = "format_version";

enum class ReadSteps { kNo, kYes };

/// @param start a line of the event "start", or null
/// @throws base::UserError if a newer version of train wrote the log.
void check_format(const std::filesystem::path& folder, const nlohmann::ordered_json& start);

/// The log.jsonl of a run's folder, read while the run writes to it. Not thread-safe.
class RunLog {
 public:
  explicit RunLog(const std::filesystem::path& folder);

  /// Whether another file has replaced what was read: a run that resumes cuts its log back. The
  /// next read() begins with its first line.
  bool is_replaced();

  /// When the log was last written, in seconds since 1970, as of the last is_replaced().
  double changed() const { return changed_; }

  /// How many lines were no JSON object: a full disk may leave such.
  int64_t damaged() const { return damaged_; }

  /// Calls `take` for each line that was completed since the last call, but for damaged lines, and
  /// for lines about steps with ReadSteps::kNo.
  void read(ReadSteps steps, const std::function<void(const nlohmann::ordered_json& line)>& take);

 private:
  std::filesystem::path path_;
  ino_t file_ = 0;
  double changed_ = 0;
  int64_t damaged_ = 0;
  std::streamoff read_ = 0;
};

}  // namespace syncbn::train
