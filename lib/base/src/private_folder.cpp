#include <syncbn/base/private_folder.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace syncbn::base {

int make_private_folder(const std::filesystem::path& path) {
  const auto folder = path.has_filename() ? path : path.parent_path();  // of "name/"
  std::error_code error;
  if (folder.has_parent_path()) std::filesystem::create_directories(folder.parent_path(), error);
  if (error) return error.value();
  if (::mkdir(folder.c_str(), S_IRWXU) == 0) return 0;
  if (errno != EEXIST) return errno;
  if (std::filesystem::is_directory(folder, error)) return 0;
  return error ? error.value() : ENOTDIR;
}

}  // namespace syncbn::base
