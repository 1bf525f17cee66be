#pragma once

#include <syncbn/launch/options.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace syncbn::launch {

/// Values as they were typed, before they are checked together.
struct TypedOptions {
  std::string nproc_per_node = "1";
  std::string bind = "none";
  std::string numa_binding;
  std::string nnodes = "1";
  int master_port = -1;  ///< -1: not given
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::string rdzv_conf;
  std::string signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  double shutdown_timeout = 30;  ///< s
  std::string prefix = "on";
  std::string redirects = "0";
  std::string tee = "0";
  std::string local_ranks_filter;
  std::string duplicate_stdout_filters;
  std::string duplicate_stderr_filters;
  std::string event_log_handler = "null";
  std::string stdin_rank = "0";
  bool use_env = false;
  bool no_use_env = false;
  std::string local_rank_arg = "--local-rank";
  std::string hosts;
  std::string hostfile;
  std::string include;
  std::string exclude;
  int ssh_port = 0;  ///< 0: not given
  std::string ssh_user;
  std::string ssh_identity;
  std::string ssh_options;
  std::string ssh_command = "ssh";
  double ssh_timeout = 20;  ///< s
  std::string exports;
  std::string completion;  ///< a shell; empty: not asked for
  bool man_page = false;
  LaunchOptions options;  ///< what needs no further reading
};

/// What CLI11 does not know of an option.
struct OptionSource {
  std::string name;                      ///< "--nnodes"
  std::vector<std::string> environment;  ///< "PET_NNODES"; the first that is set counts
  bool is_flag = false;
  bool is_torchruns = true;  ///< its abbreviations come before ours
  bool is_heads = false;     ///< for the launcher that starts the others, not for those
};

/// Describes every option to CLI11: name, help, range, group. The list of the environment variables
/// that stand for them is returned.
std::vector<OptionSource> describe_options(CLI::App& app, TypedOptions& typed);

}  // namespace syncbn::launch
