#pragma once

#include <syncbn/launch/options.h>

#include <string>
#include <string_view>
#include <vector>

#include "options/command_line.h"
#include "options/option_table.h"

namespace syncbn::launch {

/// "--hosts" or "--hostfile", whichever names the hosts; the command line takes precedence over the
/// environment. Empty if neither is given: this launcher is no head.
std::string hosts_option(const CommandLine& line);

/// @throws base::UserError for options that exclude hosts, or need them.
void check_hosts(const TypedOptions& typed, const CommandLine& line);

/// Needs a hosts_option(). @param launcher_name argv[0].
HeadOptions read_head_options(const TypedOptions& typed, const CommandLine& line,
                              std::string_view launcher_name);

}  // namespace syncbn::launch
