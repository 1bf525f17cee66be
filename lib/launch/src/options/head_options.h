#pragma once

#include <syncbn/launch/options.h>

#include <string>
#include <string_view>
#include <vector>

#include "options/command_line.h"
#include "options/option_table.h"

namespace syncbn::launch {

/// "--hosts" or "--hostfile", whichever says which hosts there are: the command line comes before
/// the environment. Empty: none does, and no head is wanted.
std::string hosts_option(const CommandLine& line);

/// @throws base::UserError for options that do not go with hosts, or not without.
void check_hosts(const TypedOptions& typed, const CommandLine& line);

/// What a head has to know, where there is a hosts_option(). @param launcher_name argv[0].
HeadOptions read_head_options(const TypedOptions& typed, const CommandLine& line,
                              std::string_view launcher_name);

}  // namespace syncbn::launch
