#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>

namespace syncbn::train {

/// The files of profiles in a run's folder.
struct ProfileFiles {
  static constexpr const char* kFolder = "profile";

  explicit ProfileFiles(const std::filesystem::path& run) : folder(run / kFolder) {}

  /// For Perfetto: all ranks on one time axis.
  std::filesystem::path trace(int64_t first_step) const {
    return folder / fmt::format("trace-{}.json.gz", first_step);
  }
  /// What summary_of() makes of the latest profile.
  std::filesystem::path summary() const { return folder / "summary.json"; }
  /// While it exists, `train profile` waits for a profile of as many steps as it says.
  std::filesystem::path request() const { return folder / "request"; }

  std::filesystem::path folder;
};

}  // namespace syncbn::train
