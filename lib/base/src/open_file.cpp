#include <syncbn/base/open_file.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace syncbn::base {

UniqueFd open_to_read(const std::filesystem::path& path, int more_flags) {
  // Without O_NONBLOCK, open() would wait for the writer of a FIFO.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | more_flags;
  UniqueFd file(::open(path.c_str(), flags));
  if (file) ::fcntl(file.get(), F_SETFL, ::fcntl(file.get(), F_GETFL) & ~O_NONBLOCK);
  return file;
}

UniqueFd open_regular_file(const std::filesystem::path& path) {
  UniqueFd file = open_to_read(path);
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0) {
    const int error = errno;
    const std::string what = fmt::format("cannot read {}", path.string());
    if (const std::string link = dangling_link(path); !link.empty()) {
      throw UserError(what + ": " + link);
    }
    throw_file_error(what, error);
  }
  if (!S_ISREG(about.st_mode)) {
    throw UserError(fmt::format("cannot read {}: it is not a regular file", path.string()));
  }
  return file;
}

bool is_missing(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::status(path, ignored).type() == std::filesystem::file_type::not_found;
}

std::string dangling_link(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_symlink(path, ignored) || !is_missing(path)) return {};
  return fmt::format("it is a link to '{}', which does not exist",
                     std::filesystem::read_symlink(path, ignored).string());
}

std::string open_error(const std::filesystem::path& path, int error) {
  const std::string link = dangling_link(path);
  return link.empty() ? describe_errno(error) : link;
}

bool is_within(const std::filesystem::path& folder, const std::filesystem::path& name) {
  if (name.native().find('\0') != std::string::npos) return false;  // open() would stop there
  const bool is_plain = name.is_relative() && name.native().find("..") == std::string::npos;
  if (is_plain) return !name.empty();
  std::error_code ignored;
  const auto root = std::filesystem::absolute(folder, ignored).lexically_normal();
  const auto inner = (root / name).lexically_normal().lexically_relative(root);
  return !inner.empty() && inner != "." && *inner.begin() != "..";
}

}  // namespace syncbn::base
