// Bytes to the readers of weights: whatever they are, tensors within the file or a base::UserError
// come out.
#include <ATen/core/Tensor.h>
#include <syncbn/base/error.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "memory_file.h"
#include "weights/mapped_file.h"
#include "weights/pickle.h"
#include "weights/safetensors.h"
#include "weights/torch_file.h"

namespace {

namespace weights = syncbn::models::detail;

/// Reads each value: memory outside of the file is the sanitizer's.
void read(const at::Tensor& tensor) {
  tensor.to(at::kFloat).sum();
}

void read_all(const weights::Value& root) {
  std::set<const weights::Value*> seen;
  std::vector<const weights::Value*> rest = {&root};
  while (!rest.empty()) {
    const weights::Value& value = *rest.back();
    rest.pop_back();
    if (!seen.insert(&value).second) continue;
    if (value.tensor.defined()) read(value.tensor);
    rest.insert(rest.end(), value.items.begin(), value.items.end());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = memory_file({reinterpret_cast<const char*>(data), size});
  try {
    const auto file = weights::MappedFile::open("/proc/self/fd/" + std::to_string(bytes.get()));
    if (weights::is_torch_file(file->bytes())) {
      weights::Values values(size);
      read_all(weights::read_torch_file(*file, values));
    } else {
      for (const auto& item : weights::read_safetensors(*file)) read(item.value());
    }
  } catch (const syncbn::base::UserError&) {
  }
  return 0;
}
