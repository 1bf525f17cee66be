#pragma once

#include <syncbn/launch/options.h>

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

class CommandLine;
struct TypedOptions;

/// --hosts: "a:4,user@b,[::1]:2". A repeated host, here and in a file, has the sum of its slots,
/// one per mention without a number. @throws base::UserError naming the entry.
std::vector<Host> read_host_list(const std::string& text);

/// --hostfile: a host per line, as "a", "a:4", "a slots=4" or "a slots=4 max_slots=8"; # begins a
/// comment.
/// @throws base::UserError naming file and line.
std::vector<Host> read_host_file(const std::filesystem::path& file);

/// Variables of the head that other hosts get without --export: search paths for programs and
/// libraries, and settings of training libraries. Other variables may apply to one machine only, or
/// be secret.
inline constexpr std::array kDefaultExports{"PATH",         "LD_LIBRARY_PATH",
                                            "PYTHON*",      "VIRTUAL_ENV",
                                            "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
                                            "CUDA_*",       "!CUDA_VISIBLE_DEVICES",
                                            "NCCL_*",       "GLOO_*",
                                            "UCX_*",        "FI_*",
                                            "TORCH_*",      "PYTORCH_*",
                                            "OMP_*",        "KMP_*",
                                            "GOMP_*",       "MKL_*",
                                            "OPENBLAS_*",   "SYNCBN_*"};

/// The variables of this process that other hosts get.
/// @param more patterns after kDefaultExports: NAME, PREFIX_* (a shell's wildcards), or !NAME to
/// exclude it. The last pattern that matches a variable decides.
Variables exported_variables(const std::vector<std::string>& more);

/// "--hosts" or "--hostfile", whichever names the hosts; the command line takes precedence over the
/// environment. Empty if neither is given: this launcher is no head.
std::string hosts_option(const CommandLine& line);

/// @throws base::UserError for options that exclude hosts, or need them.
void check_hosts(const TypedOptions& typed, const CommandLine& line);

/// All but the timeout. Needs a hosts_option().
HeadOptions read_head_options(const TypedOptions& typed, const CommandLine& line);

}  // namespace syncbn::launch
