#include "weights/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <c10/core/CPUAllocator.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>

namespace syncbn::models::detail {

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const auto fail = [&](int error) {
    base::throw_file_error(fmt::format("cannot read {}", path), error);
  };
  // O_NONBLOCK, or open() would wait for a writer of a FIFO.
  const base::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) fail(errno);
  if (!S_ISREG(status.st_mode)) {
    throw base::UserError(fmt::format("cannot read {}: it is not a regular file", path));
  }
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) throw base::UserError(fmt::format("cannot read {}: it is empty", path));
  void* const data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) fail(errno);
  return std::shared_ptr<const MappedFile>(new MappedFile(static_cast<char*>(data), size));
}

MappedFile::~MappedFile() {
  ::munmap(data_, size_);
}

c10::Storage MappedFile::storage(std::string_view part, size_t element_size) const {
  if (reinterpret_cast<uintptr_t>(part.data()) % element_size != 0) {
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
