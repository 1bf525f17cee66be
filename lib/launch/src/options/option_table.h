#pragma once

#include <syncbn/config/field_info.h>
#include <syncbn/config/schema.h>
#include <syncbn/launch/options.h>

#include <optional>
#include <string>
#include <vector>

namespace syncbn::launch {

/// Attributes of an option, in config::FieldInfo::tags.
enum OptionTag : unsigned {
  kTorchruns = 1U << 0,      ///< torchrun has it: in abbreviations it takes precedence over ours
  kMayBeEmpty = 1U << 1,     ///< an empty value counts as not given, as in torchrun
  kMostUsed = 1U << 2,       ///< in the help without a topic
  kAboutRun = 1U << 3,       ///< named in a hint if it stands after a program that failed
  kNeedsHosts = 1U << 4,     ///< only a head takes it
  kExcludesHosts = 1U << 5,  ///< the list of hosts determines the nodes
  kKeptByHead = 1U << 6,     ///< a head does not pass it on to the launchers of the nodes
  kNotForCheck = 1U << 7,    ///< does not apply to the check of --preflight
};

/// The values of the command line, by option. Options whose value needs no parsing are members of
/// LaunchOptions; options.cpp parses the texts below.
struct TypedOptions : LaunchOptions {
  std::string nproc_per_node_text = "1";
  std::string bind = "none";
  std::string numa_binding;
  std::string nnodes_text = "1";
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::string rdzv_conf;
  std::string token_file;
  std::string max_restarts_text = "0";
  std::string shutdown_text = "30";
  std::string hang_text;
  std::string straggler_text = "30";
  std::string prefix_text = "on";
  std::string redirects_text = "0";
  std::string tee_text = "0";
  std::string local_ranks_filter_text;
  std::string stdout_filters_text;
  std::string stderr_filters_text;
  std::string event_log_handler = "null";
  std::string stdin_text = "0";
  bool use_env = false;
  bool no_use_env = false;
  std::string rank_argument = "--local-rank";
  std::string hosts;
  std::string hostfile;
  std::optional<int> ssh_port;
  std::string ssh_user;
  std::string ssh_identity;
  std::string ssh_options;
  std::string ssh_command = "ssh";
  std::string ssh_launcher;
  std::string ssh_timeout_text = "20";
  std::string exports;
  std::string without_effect;  ///< options that only torchrun needs
  bool help = false;
  bool version = false;
  std::string completion;  ///< a shell; empty: not asked for

  static void describe(config::Schema<TypedOptions>& schema);
};

/// Every option, in the order of the help.
const std::vector<config::FieldInfo>& option_fields();

/// The tags of the option that `word` gives a value: "--nnodes=2" or "--standalone".
unsigned tags_of(const std::string& word);

/// Throws base::UserError with the replacement if `name` ("ssh_all") is an option that no longer
/// exists.
void throw_if_removed(const std::string& name);

}  // namespace syncbn::launch
