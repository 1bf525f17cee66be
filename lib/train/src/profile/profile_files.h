#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>

namespace syncbn::train {

/// The files of profiles in a run's folder.
struct ProfileFiles {
  static constexpr const char* kFolder = "profile";

  explicit ProfileFiles(const std::filesystem::path& run) : folder(run / kFolder) {}

  /// Kineto's trace of a rank, from this step on.
  std::filesystem::path trace(int64_t first_step, int64_t rank) const {
    return folder / fmt::format("trace-{}-rank-{}.json", first_step, rank);
  }
  /// summary_of() the latest profile.
  std::filesystem::path summary() const { return folder / "summary.json"; }
  /// Asks the run for a profile of as many steps as it says; `train profile` waits until the run
  /// removes it.
  std::filesystem::path request() const { return folder / "request"; }

  std::filesystem::path folder;
};

}  // namespace syncbn::train
