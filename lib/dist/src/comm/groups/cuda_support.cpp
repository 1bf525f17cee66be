#include "groups/cuda_support.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

namespace syncbn::dist::detail {
namespace {

constexpr char kEntryPoint[] = "syncbn_cuda_support";

struct Library {
  void* handle = nullptr;
  std::string error;
};

/// Looks in the folder of the library that contains this code.
Library load() {
  // Without a driver there is no GPU, and loading libtorch's CUDA part doubles the start-up time.
  if (::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    return {nullptr, fmt::format("there is no NVIDIA driver here ({})", ::dlerror())};
  }
  Dl_info self{};
  std::string path = "libsyncbn_dist_cuda.so";
  if (::dladdr(reinterpret_cast<const void*>(&cuda_support), &self) != 0 &&
      self.dli_fname != nullptr) {
    path = (std::filesystem::path(self.dli_fname).parent_path() / path).string();
  }
  // Never closed: the library's threads live as long as the process.
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr || ::dlsym(handle, kEntryPoint) == nullptr) return {nullptr, ::dlerror()};
  return {handle, ""};
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace

const CudaSupport* cuda_support() {
  if (library().handle == nullptr) return nullptr;
  using EntryPoint = const void* (*)();
  const auto entry = reinterpret_cast<EntryPoint>(::dlsym(library().handle, kEntryPoint));
  return static_cast<const CudaSupport*>(entry());
}

std::string cuda_support_error() {
  return library().error;
}

}  // namespace syncbn::dist::detail
