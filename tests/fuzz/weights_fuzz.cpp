// Feeds bytes to the readers of weights and of a run's checkpoint. They must return tensors within
// the file or throw base::UserError.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <libdeflate.h>
#include <syncbn/base/error.h>
#include <syncbn/train/checkpoint.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "memory_file.h"
#include "require.h"
#include "weights/mapped_file.h"
#include "weights/pickle.h"
#include "weights/safetensors.h"
#include "weights/torch_file.h"

namespace {

namespace weights = syncbn::models::detail;
using syncbn::base::UserError;

/// Reads each value, so that the sanitizer finds memory outside of the file.
void read(const at::Tensor& tensor) {
  const size_t end = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  require(end <= tensor.storage().nbytes());
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

/// A checkpoint is an archive of torch.save whose comment is a checksum, which a fuzzer does not
/// guess.
std::string sealed(std::string archive) {
  constexpr std::string_view kChecksum = "syncbn crc32 ";
  constexpr size_t kDigits = 8;
  if (archive.size() < 2) return archive;
  archive[archive.size() - 2] = static_cast<char>(kChecksum.size() + kDigits);
  archive[archive.size() - 1] = 0;
  archive += kChecksum;
  return archive + fmt::format("{:08x}", libdeflate_crc32(0, archive.data(), archive.size()));
}

void read_checkpoint(const std::string& archive) {
  const auto checkpoint = syncbn::train::parse_checkpoint(sealed(archive), "file");
  for (const auto* tensors : {&checkpoint.model, &checkpoint.ema, &checkpoint.scaler}) {
    for (const auto& [name, tensor] : *tensors) read(tensor);
  }
  for (const auto& [parameter, tensors] : checkpoint.optimizer) {
    for (const auto& [name, tensor] : tensors) read(tensor);
  }
  for (const auto* tensors : {&checkpoint.rng_states, &checkpoint.rank_buffers}) {
    for (const at::Tensor& tensor : *tensors) read(tensor);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = memory_file({reinterpret_cast<const char*>(data), size});
  may_refuse<UserError>([&] {
    const auto file = weights::MappedFile::open("/proc/self/fd/" + std::to_string(bytes.get()));
    if (weights::is_torch_file(file->bytes())) {
      weights::Values values(size);
      read_all(weights::read_torch_file(*file, values));
    } else {
      for (const auto& item : weights::read_safetensors(*file)) read(item.value());
    }
  });
  may_refuse<UserError>(
      [&] { read_checkpoint(std::string(reinterpret_cast<const char*>(data), size)); });
  return 0;
}
