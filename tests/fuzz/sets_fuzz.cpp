// Feeds bytes to the readers of data sets: COCO's annotations, MNIST's and CIFAR's files,
// and images as CSV. The first byte selects the reader.
#include <syncbn/base/error.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "memory_file.h"
#include "require.h"
#include "sets/coco_instances.h"
#include "sets/memory_files.h"

namespace {

using namespace syncbn::data;
using namespace syncbn::data::detail;

std::string path_of(const syncbn::base::UniqueFd& file) {
  return "/proc/self/fd/" + std::to_string(file.get());
}

/// Each annotation must belong to a photo and a class, and have a box.
void read_coco(std::string_view bytes) {
  const auto file = memory_file(bytes);
  const CocoInstances read = read_coco_instances(path_of(file));
  size_t annotations = 0;
  for (const CocoInstances::Photo& photo : read.photos) annotations += read.of(photo).size();
  require(annotations == read.annotations.size());
  for (const auto& one : read.annotations) {
    require(one.label >= 0 && static_cast<size_t>(one.label) < read.classes.size());
    require(one.width >= 0 && one.height >= 0 && std::isfinite(one.x + one.y + one.area));
  }
}

/// Each image must have all its pixels and the label of a class.
void require_whole(size_t pixels, size_t pixels_of_image, const std::vector<int64_t>& labels,
                   int64_t classes) {
  require(labels.empty() ? pixels == 0 : pixels / pixels_of_image == labels.size());
  require(labels.empty() || pixels % pixels_of_image == 0);
  for (const int64_t label : labels) require(label >= 0 && label < classes);
}

void require_whole(const StoredImages& images) {
  const auto [width, height] = images.size;
  require_whole(images.pixels.size(), static_cast<size_t>(width * height * images.channels),
                images.labels, images.classes);
}

/// @param bytes the size of the images' file, that file, and the labels' file
void read_idx_files(std::string_view bytes) {
  if (bytes.empty()) return;
  const size_t size = static_cast<uint8_t>(bytes.front());
  bytes.remove_prefix(1);
  const auto images = memory_file(bytes.substr(0, size));
  const auto labels = memory_file(bytes.substr(std::min(size, bytes.size())));
  require_whole(read_mnist(path_of(images), path_of(labels)));
}

void read_csv(std::string_view bytes) {
  constexpr CsvLayout kLayout{
      .pixels = 4, .max_pixel = 16, .classes = 3, .max_file_bytes = size_t{1} << 20};
  const auto file = memory_file(bytes);
  const CsvSamples samples = read_labelled_csv(path_of(file), kLayout, 0.5, Split::kTest);
  require_whole(samples.pixels.size(), kLayout.pixels, samples.labels, kLayout.classes);
  require(std::ranges::all_of(samples.pixels, [](int value) { return value <= 16; }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  try {
    switch (data[0] % 5) {
      case 0:
        read_coco(bytes);
        break;
      case 1:
        read_idx_files(bytes);
        break;
      case 2:
      case 3: {
        const auto file = memory_file(bytes);
        require_whole(read_cifar({path_of(file)}, data[0] % 5 == 2 ? 10 : 100));
        break;
      }
      default:
        read_csv(bytes);
    }
  } catch (const syncbn::base::UserError&) {
  }
  return 0;
}
