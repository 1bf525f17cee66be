#pragma once

#include <cstdint>

// Arguments and launch shape of the CUDA kernel that normalizes images. Plain C++: the host's
// compiler reads it as well.

namespace syncbn::data::cuda {

/// Upper bound on the channels of an image: `mean` and `std` must fit into the kernel's arguments.
inline constexpr int kMaxChannels = 256;
/// Upper bound on the values of an image, so that offsets in it fit into an int.
inline constexpr int64_t kMaxValues = int64_t{1} << 30;
inline constexpr int kThreads = 256;
/// Number of consecutive output values that a thread computes, and stores at once.
inline constexpr int kPack = 8;

enum class ImageType : int { kFloat, kHalf, kBFloat16 };

/// Images are dense: contiguous or channels-last.
struct NormalizeArguments {
  const uint8_t* images = nullptr;
  void* output = nullptr;
  /// [samples, 2], height and width of each image; null: all images fill the batch.
  const int64_t* sizes = nullptr;
  int64_t samples = 0;
  int channels = 0, height = 0, width = 0;
  bool from_channels_last = false, to_channels_last = false;
  /// All packs are full, and aligned to kPack bytes in `images` and 16 bytes in `output`.
  bool aligned = false;
  float mean[kMaxChannels] = {}, std[kMaxChannels] = {};  ///< of values from 0 to 255

  constexpr int values() const { return channels * height * width; }
  unsigned blocks() const {
    return static_cast<unsigned>((values() + kThreads * kPack - 1) / (kThreads * kPack));
  }
  /// gridDim.y, whose limit is 65535; a block may process several samples.
  unsigned rows() const { return static_cast<unsigned>(samples < 65535 ? samples : 65535); }
};

}  // namespace syncbn::data::cuda
