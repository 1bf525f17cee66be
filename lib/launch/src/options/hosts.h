#pragma once

#include <syncbn/launch/options.h>

#include <filesystem>
#include <string>
#include <vector>

namespace syncbn::launch {

/// --hosts: "a:4,user@b,[::1]:2". @throws base::UserError naming the entry.
std::vector<Host> read_host_list(const std::string& text);

/// --hostfile: a host per line, as "a", "a:4" or "a slots=4"; # begins a comment.
/// @throws base::UserError naming file and line.
std::vector<Host> read_host_file(const std::filesystem::path& file);

/// The hosts that --include names (empty: all) and --exclude does not, in their old order.
/// @throws base::UserError for a name that no host has, and if no host is left.
std::vector<Host> choose_hosts(const std::vector<Host>& hosts, const std::string& include,
                               const std::string& exclude);

}  // namespace syncbn::launch
