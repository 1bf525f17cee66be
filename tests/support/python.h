#pragma once

#include <syncbn/base/env.h>

#include <string>
#include <vector>

#include "support/program.h"

namespace syncbn::test {

/// The Python to compare with: SYNCBN_TEST_PYTHON, else the one in PATH.
inline std::string python() {
  return base::env("SYNCBN_TEST_PYTHON").value_or("python3");
}

/// Version of its torch, such as "2.11.0"; empty when it has none.
inline std::string python_torch_version() {
  static const auto said =
      run_program({python(), "-c", "import torch; print(torch.__version__.split('+')[0], end='')"});
  return said.out;
}

/// Whether that one has torch; tests that need it are skipped otherwise ("python-torch").
inline bool python_has_torch() {
  static const bool has = run_program({python(), "-c", "import torch.distributed"}).exit_code == 0;
  return has;
}

/// Whether it can import `module`.
inline bool python_has(const std::string& module) {
  return run_program({python(), "-c", "import " + module}).exit_code == 0;
}

/// Words that run the Python program `script`, whose ranks train with PyTorch's
/// DistributedDataParallel. Arguments may follow.
inline std::vector<std::string> python_ddp_program(const std::string& script) {
  return {python(), SYNCBN_SOURCE_DIR "/tests/support/run_then_leave.py", script};
}

}  // namespace syncbn::test
