#include "weights/mapped_file.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/CPUAllocator.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>

namespace syncbn::models::detail {

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const base::UniqueFd file = base::open_regular_file(path);
  const auto size = static_cast<size_t>(::lseek(file.get(), 0, SEEK_END));
  if (size == 0) throw base::UserError(fmt::format("cannot read {}: it is empty", path));
  void* const data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) base::throw_file_error(fmt::format("cannot read {}", path), errno);
  return std::shared_ptr<const MappedFile>(new MappedFile(static_cast<char*>(data), size));
}

std::shared_ptr<const MappedFile> MappedFile::copy_of(std::string_view bytes) {
  void* const data = ::mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  if (data == MAP_FAILED) base::throw_errno("no memory for the bytes of a file");
  std::memcpy(data, bytes.data(), bytes.size());
  return std::shared_ptr<const MappedFile>(new MappedFile(static_cast<char*>(data), bytes.size()));
}

MappedFile::~MappedFile() {
  ::munmap(data_, size_);
}

c10::Storage MappedFile::storage(std::string_view part, size_t element_size) const {
  const auto address = reinterpret_cast<uintptr_t>(part.data());
  const bool is_mapped = address - reinterpret_cast<uintptr_t>(data_) < size_;
  if (!is_mapped || address % element_size != 0) {
    at::DataPtr copy = c10::GetCPUAllocator()->allocate(part.size());
    if (!part.empty()) std::memcpy(copy.get(), part.data(), part.size());
    return {c10::Storage::use_byte_size_t(), part.size(), std::move(copy)};
  }
  using Owner = std::shared_ptr<const MappedFile>;
  auto owner = std::make_unique<Owner>(shared_from_this());
  char* const data = data_ + (part.data() - data_);
  at::DataPtr pointer(
      data, owner.release(), [](void* context) { delete static_cast<Owner*>(context); },
      at::Device(at::kCPU));
  return {c10::Storage::use_byte_size_t(), part.size(), std::move(pointer)};
}

}  // namespace syncbn::models::detail
