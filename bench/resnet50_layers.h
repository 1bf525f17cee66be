#pragma once

#include <cstdint>

namespace syncbn::bench {

struct Shape {
  int64_t channels, size;
  int count;
};

/// ResNet-50's batch-norm layers for images of 224 x 224. A bottleneck has two narrow layers and a
/// wide one. The first bottleneck of each stage has one more wide layer, and its first layer still
/// has the size of the previous stage.
inline constexpr Shape kResnet50Layers[] = {
    {64, 112, 1}, {64, 56, 6},   {256, 56, 4},  {128, 56, 1}, {128, 28, 7}, {512, 28, 5},
    {256, 28, 1}, {256, 14, 11}, {1024, 14, 7}, {512, 14, 1}, {512, 7, 5},  {2048, 7, 4}};

}  // namespace syncbn::bench
