#include "groups/cuda_support.h"

#include <dlfcn.h>

#include <filesystem>

namespace syncbn::dist::detail {
namespace {

struct Loaded {
  void* library = nullptr;
  const CudaSupport* support = nullptr;
  std::string error;
};

Loaded load() {
  // Beside the library that this code is in, wherever it was installed.
  Dl_info self{};
  std::string path = "libsyncbn_dist_cuda.so";
  if (::dladdr(reinterpret_cast<const void*>(&cuda_support), &self) != 0 &&
      self.dli_fname != nullptr) {
    path = (std::filesystem::path(self.dli_fname).parent_path() / path).string();
  }
  // Never closed: its kernels and threads live as long as the process.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return {nullptr, nullptr, ::dlerror()};
  const auto entry = reinterpret_cast<CudaEntryPoint>(::dlsym(library, kCudaSupportEntryPoint));
  if (entry == nullptr) return {nullptr, nullptr, ::dlerror()};
  return {library, static_cast<const CudaSupport*>(entry()), ""};
}

const Loaded& loaded() {
  static const Loaded result = load();
  return result;
}

}  // namespace

const CudaSupport* cuda_support() {
  return loaded().support;
}

const void* cuda_table(const char* entry_point) {
  if (loaded().library == nullptr) return nullptr;
  const auto entry = reinterpret_cast<CudaEntryPoint>(::dlsym(loaded().library, entry_point));
  return entry == nullptr ? nullptr : entry();
}

std::string cuda_support_error() {
  return loaded().error;
}

}  // namespace syncbn::dist::detail
