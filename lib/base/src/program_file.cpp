#include <syncbn/base/program_file.h>

#include <string>
#include <system_error>

namespace syncbn::base {

std::filesystem::path program_file() {
  std::error_code ignored;
  auto running = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const std::string name = running.filename();
  const auto folder = running.parent_path();
  const size_t end = name.find("_program");
  if (end == name.npos || !folder.string().ends_with("/libexec/syncbn")) return running;
  return folder.parent_path().parent_path() / "bin" / name.substr(0, end);
}

}  // namespace syncbn::base
