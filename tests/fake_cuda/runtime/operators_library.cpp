#include "operators_library.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace fake_cuda {
namespace {

std::atomic<bool> has_new_library{false};

std::string folder_of_this_library() {
  Dl_info self{};
  ::dladdr(reinterpret_cast<const void*>(&load_operators_of_new_libraries), &self);
  const std::string path = self.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace

void note_new_library() {
  has_new_library = true;
}

void load_operators_of_new_libraries() {
  if (!has_new_library) return;
  // Recursive: registering operators calls CUDA. Other threads wait until all are registered.
  static auto* const mutex = new std::recursive_mutex;
  const std::lock_guard lock(*mutex);
  static bool is_loading = false;
  if (is_loading) return;
  is_loading = true;
  if (::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD) != nullptr) {
    const std::string path = folder_of_this_library() + "libfake_cuda_operators.so";
    if (::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::fprintf(stderr, "fake_cuda: %s\n", ::dlerror());
      std::abort();
    }
  }
  has_new_library = false;
  is_loading = false;
}

}  // namespace fake_cuda
