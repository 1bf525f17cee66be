// Bytes to the reader of COCO's annotations: each annotation is of a photo, a class and within it.
#include <syncbn/base/error.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "memory_file.h"
#include "require.h"
#include "sets/coco_instances.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using syncbn::data::detail::CocoInstances;
  const auto file = memory_file({reinterpret_cast<const char*>(data), size});
  try {
    const CocoInstances read =
        syncbn::data::detail::read_coco_instances("/proc/self/fd/" + std::to_string(file.get()));
    size_t annotations = 0;
    for (const CocoInstances::Photo& photo : read.photos) annotations += read.of(photo).size();
    require(annotations == read.annotations.size());
    for (const auto& one : read.annotations) {
      require(one.label >= 0 && static_cast<size_t>(one.label) < read.classes.size());
    }
  } catch (const syncbn::base::UserError&) {
  }
  return 0;
}
