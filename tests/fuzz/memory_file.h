#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string_view>

#include "require.h"

/// An open file with these bytes.
inline syncbn::base::UniqueFd memory_file(std::string_view bytes) {
  syncbn::base::UniqueFd file(::memfd_create("fuzz", 0));
  require(::write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  return file;
}
