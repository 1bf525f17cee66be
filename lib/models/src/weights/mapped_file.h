#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include <c10/core/Storage.h>

namespace syncbn::models::detail {

/// A file mapped into memory, each page read at first use, or a copy of a file. Tensors made from
/// it keep it alive; writing to them does not change the file. The file must not be truncated
/// meanwhile.
class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  /// @throws base::UserError or base::UnavailableError naming the file.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  /// @param bytes not empty
  static std::shared_ptr<const MappedFile> copy_of(std::string_view bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, size_}; }

  /// A storage of `part`, without a copy if that is in bytes() and aligned for its elements.
  c10::Storage storage(std::string_view part, size_t element_size) const;

 private:
  MappedFile(char* data, size_t size) : data_(data), size_(size) {}

  char* data_;
  size_t size_;
};

}  // namespace syncbn::models::detail
