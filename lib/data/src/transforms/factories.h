#pragma once

#include <syncbn/data/transforms.h>

namespace syncbn::data::detail {

/// Each file of transforms registers its own.
void add_crops(TransformKind::Registry& registry);
void add_geometry(TransformKind::Registry& registry);
void add_colors(TransformKind::Registry& registry);
void add_auto_augment(TransformKind::Registry& registry);

/// The part in `box`, of the mask too.
void crop_sample(ImageSample& sample, const Box& box);

/// Image by bilinear, mask by nearest neighbour.
void resize_sample(ImageSample& sample, ImageSize size);

ImageSize size_of(const Image& image);

}  // namespace syncbn::data::detail
