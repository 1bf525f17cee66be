#include "commands/commands.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/command_line.h>
#include <syncbn/config/help_lines.h>

#include <vector>

#include "common/kinds.h"

namespace syncbn::train {

std::string list_of(const std::string& wanted) {
  constexpr size_t kColumn = 12;  // of the names
  constexpr size_t kWidth = 80;
  std::vector<std::string> names;
  std::string all;
  for (const Kind& kind : all_kinds()) {
    if (kind.name == wanted) return config::list_text(kind.registry());
    names.emplace_back(kind.name);
    all += fmt::format("{:<{}}{}\n", kind.name, kColumn,
                       config::wrapped(base::join(kind.registry().names(), ", "), kColumn, kWidth));
  }
  if (wanted.empty()) return all;
  throw base::UserError(fmt::format("--list: expected one of {}, got '{}'{}",
                                    base::join(names, ", "), wanted,
                                    base::did_you_mean(wanted, names)));
}

}  // namespace syncbn::train
