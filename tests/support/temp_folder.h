#pragma once

#include <stdlib.h>
#include <syncbn/base/error.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace syncbn::test {

/// A folder that is removed when this object is destroyed.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "syncbn-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) base::throw_errno(name);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

  /// Creates a file and returns its path.
  std::string write(const std::string& name, const std::string& text,
                    bool executable = false) const {
    const std::filesystem::path file = path_ / name;
    std::ofstream(file) << text;
    if (executable) std::filesystem::permissions(file, std::filesystem::perms(0755));
    return file;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace syncbn::test
