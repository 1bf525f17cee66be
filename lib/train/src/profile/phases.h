#pragma once

namespace syncbn::train {

// The phases of a step by the names under which it records them (at::RecordFunction).
inline constexpr const char* kLoaderPhase = "loader";
inline constexpr const char* kToDevicePhase = "to device";
inline constexpr const char* kForwardPhase = "forward";
inline constexpr const char* kBackwardPhase = "backward";
inline constexpr const char* kOptimizerPhase = "optimizer";
inline constexpr const char* kVotePhase = "vote";

}  // namespace syncbn::train
