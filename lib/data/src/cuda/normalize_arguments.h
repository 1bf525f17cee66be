#pragma once

#include <cstdint>

// What the host passes to the CUDA kernel that normalizes images, and the shape of its launch.
// Plain C++, for the host's compiler too.

namespace syncbn::data::cuda {

/// Upper bound on the channels of an image: what a kernel's arguments have room for.
inline constexpr int kMaxChannels = 256;
/// Upper bound on the values of an image, so that places inside it fit into an int.
inline constexpr int64_t kMaxValues = int64_t{1} << 30;
inline constexpr int kThreads = 256;
/// Consecutive values of the output that a thread computes, and stores at once.
inline constexpr int kPack = 8;

enum class ImageType : int { kFloat, kHalf, kBFloat16 };

/// What a launch needs, and its shape. Images are dense: contiguous, or channels-last.
struct NormalizeArguments {
  const uint8_t* images = nullptr;
  void* output = nullptr;
  /// [samples, 2], height and width of each image; null: all images fill the batch.
  const int64_t* sizes = nullptr;
  int64_t samples = 0;
  int channels = 0, height = 0, width = 0;
  bool from_channels_last = false, to_channels_last = false;
  /// Every pack is full, and starts at a multiple of its size in images and of 16 bytes in output.
  bool aligned = false;
  float mean[kMaxChannels] = {}, std[kMaxChannels] = {};  ///< of bytes

  constexpr int values() const { return channels * height * width; }
  unsigned blocks() const {
    return static_cast<unsigned>((values() + kThreads * kPack - 1) / (kThreads * kPack));
  }
  /// Blocks for the samples, each of which may get several.
  unsigned rows() const { return static_cast<unsigned>(samples < 65535 ? samples : 65535); }
};

}  // namespace syncbn::data::cuda
