// What a process has asked of the fake NCCL. A test that includes this links nothing.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace fake_nccl {

/// Values of the last ncclConfig_t, and the priority of the stream of the last collective.
struct Settings {
  int blocking, min_ctas, max_ctas, priority;
};

/// Aborts without the fake NCCL.
inline Settings settings() {
  const auto* const found =
      static_cast<const Settings*>(::dlsym(RTLD_DEFAULT, "fake_nccl_settings"));
  if (found == nullptr) std::abort();
  return *found;
}

/// Whether this process has a communicator that is neither destroyed nor aborted.
inline bool has_communicators() {
  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  return text.find("fake-nccl") != std::string::npos;
}

}  // namespace fake_nccl
