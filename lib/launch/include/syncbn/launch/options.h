#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::launch {

/// What the command line and the PET_* environment ask for, checked.
struct LaunchOptions {
  int nproc_per_node = 1;
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr;         ///< empty: not given
  std::optional<int> master_port;  ///< 0: any free one
  bool standalone = false;
  std::string role = "default";

  bool module = false;     ///< -m: the program is a Python module's name
  bool no_python = false;  ///< run a *.py file as any other program

  std::chrono::milliseconds shutdown_timeout{30'000};  ///< between SIGTERM and SIGKILL
  bool prefix = true;  ///< "[rank] " before lines of several workers
  bool dry_run = false;

  std::vector<std::string> program;  ///< the program's name and its arguments, untouched
};

/// Reads argv[1…] (dashes or underscores, unambiguous prefixes of long options, `--x=v` or `--x v`)
/// up to the program's name; everything after it is the program's.
/// @throws UserError with one message: unknown option, bad value, options that exclude each other.
/// Empty after --help or --version, whose text went to stdout.
std::optional<LaunchOptions> parse_options(int argc, const char* const* argv);

}  // namespace syncbn::launch
