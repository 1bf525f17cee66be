#include "commands/commands.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/command_line.h>

#include <vector>

#include "common/kinds.h"

namespace syncbn::train {

std::string list_of(const std::string& wanted) {
  std::vector<std::string> names;
  for (const Kind& kind : all_kinds()) {
    if (kind.name == wanted) return config::list_text(kind.registry());
    names.emplace_back(kind.name);
  }
  throw base::UserError(fmt::format("--list: expected one of {}, got '{}'{}",
                                    base::join(names, ", "), wanted,
                                    base::did_you_mean(wanted, names)));
}

}  // namespace syncbn::train
