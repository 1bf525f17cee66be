#pragma once

#include <syncbn/base/env.h>

#include <string>
#include <vector>

#include "support/program.h"

namespace syncbn::test {

/// The Python to compare with: SYNCBN_TEST_PYTHON, or the one in PATH.
inline std::string python() {
  return base::env("SYNCBN_TEST_PYTHON").value_or("python3");
}

/// The version of its torch, such as "2.11.0"; empty without torch. scripts/run-tests determines it
/// once for all tests, because importing torch takes seconds.
inline std::string python_torch_version() {
  if (const auto known = base::env("SYNCBN_TEST_TORCH_VERSION")) return *known;
  static const auto found = run_program(
      {python(), "-c",
       "import torch.distributed, torch; print(torch.__version__.split('+')[0], end='')"});
  return found.out;
}

/// Whether Python has torch. Tests that need it are skipped otherwise ("python-torch").
inline bool python_has_torch() {
  return !python_torch_version().empty();
}

/// Whether Python finds the modules, whose names are separated by commas. Importing them would take
/// seconds.
inline bool python_has(const std::string& modules) {
  const std::string find =
      "import importlib.util as util, sys\n"
      "sys.exit(any(util.find_spec(name.strip()) is None for name in sys.argv[1].split(',')))";
  return run_program({python(), "-c", find, modules}).exit_code == 0;
}

/// A Python program whose ranks print their number and the sum of all numbers. Each does so in one
/// write, because torchrun's workers share a pipe.
inline constexpr const char* kSumOfRanks = R"(import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {int(total)}\n")
sys.stdout.flush()
dist.destroy_process_group()
)";

/// argv for the Python program `script`, whose ranks train with PyTorch's DistributedDataParallel.
/// Arguments may be appended.
inline std::vector<std::string> python_ddp_program(const std::string& script) {
  return {python(), SYNCBN_SOURCE_DIR "/tests/support/run_then_leave.py", script};
}

}  // namespace syncbn::test
