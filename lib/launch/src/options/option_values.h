#pragma once

#include <syncbn/launch/options.h>

#include <string>
#include <vector>

#include "options/option_table.h"

namespace syncbn::launch {

// What single options mean. All throw a base::UserError that names option and value where that is
// nothing.

/// --nproc_per_node: a number, or how many cores or GPUs there are.
int count_workers(const std::string& typed, bool virtual_local_rank);

/// --bind and --numa_binding.
Binding read_binding(const TypedOptions& typed);

/// --nnodes.
NodeRange read_nodes(const std::string& typed);

/// --redirects and --tee.
StreamChoice read_stream_choice(const std::string& option, const std::string& typed);

/// --local_ranks_filter.
std::vector<int> read_local_ranks(const std::string& typed, int nproc);

/// Texts with commas between, as torchrun splits them: ",," is a comma in a text.
std::vector<std::string> read_filters(const std::string& typed);

/// --stdin: a rank, or -1 for none.
int read_stdin_rank(const std::string& typed);

/// --event_log_handler.
void read_event_log(const std::string& typed, LaunchOptions& options);

/// --rdzv_endpoint.
void read_endpoint(const std::string& endpoint, LaunchOptions& options);

/// --rdzv_conf, with torchrun's names; what it offers beyond these is about its own store.
void read_rendezvous_settings(const std::string& typed, LaunchOptions& options);

/// --signals_to_handle and --shutdown_timeout.
void read_ending(LaunchOptions& options, double shutdown_seconds);

/// Takes the brackets off --master_addr: an IPv6 address may stand in them.
void read_master_addr(LaunchOptions& options);

}  // namespace syncbn::launch
