#include <syncbn/data/data_files.h>

#include <fmt/format.h>

#include <vector>

#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data {
namespace {

std::vector<std::filesystem::path> places() {
  std::vector<std::filesystem::path> all;
  if (const auto folder = base::env("SYNCBN_DATA_DIR")) all.emplace_back(*folder);
  std::error_code unreadable;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  if (!unreadable) all.push_back(program.parent_path().parent_path() / "share/syncbn/data");
  all.emplace_back("./data");
  return all;
}

}  // namespace

std::filesystem::path find_data_file(const std::string& name) {
  std::vector<std::string> tried;
  for (const auto& folder : places()) {
    std::error_code unreadable;
    if (std::filesystem::exists(folder / name, unreadable)) return folder / name;
    tried.push_back(folder.string());
  }
  throw base::UserError(fmt::format(
      "the data file '{}' was not found (looked in {}); set SYNCBN_DATA_DIR to the folder that "
      "holds it, or give its path in the configuration",
      name, base::join(tried, ", ")));
}

}  // namespace syncbn::data
