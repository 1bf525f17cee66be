#pragma once

#include <syncbn/launch/options.h>

#include <chrono>
#include <string>
#include <vector>

#include "options/option_table.h"

namespace syncbn::launch {

// Each function reads the value of the option that it is named after.
// @throws base::UserError that names the option and its value.

/// A time: seconds, or a number with a unit, as 500ms, 30s, 5m or 5min, 2h, 1d.
std::chrono::milliseconds read_time(const std::string& option, const std::string& typed,
                                    std::chrono::milliseconds min, std::chrono::milliseconds max);
/// --nproc_per_node: a number, or the number of cores or GPUs.
int count_workers(const std::string& typed, bool virtual_local_rank);
/// --bind and --numa_binding.
Binding read_binding(const TypedOptions& typed);
NodeRange read_nodes(const std::string& typed);
/// @param option --redirects or --tee.
StreamChoice read_stream_choice(const std::string& option, const std::string& typed);
std::vector<int> read_local_ranks(const std::string& typed, int nproc);
/// Splits texts at commas as torchrun does: ",," is a comma in a text.
std::vector<std::string> read_filters(const std::string& typed);
/// -1 for none.
int read_stdin_rank(const std::string& typed);
void read_event_log(const std::string& typed, LaunchOptions& options);
/// --rdzv_endpoint.
void read_endpoint(const std::string& endpoint, LaunchOptions& options);
/// --rdzv_conf, with torchrun's names. Settings of torchrun's own store have no effect.
void read_rendezvous_settings(const std::string& typed, LaunchOptions& options);
/// --max_restarts: a number, or a number within a time.
void read_restarts(const std::string& typed, LaunchOptions& options);
/// --signals_to_handle, --shutdown_timeout and --hang_timeout.
void read_ending(const TypedOptions& typed, LaunchOptions& options);
/// Removes the brackets of an IPv6 address in --master_addr.
void read_master_addr(LaunchOptions& options);

}  // namespace syncbn::launch
