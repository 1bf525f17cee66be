#pragma once

#include <filesystem>
#include <string>

namespace syncbn::launch {

/// The folder of this run with a place for each worker's error file (TORCHELASTIC_ERROR_FILE),
/// where torch's @record leaves the exception as JSON. Removed at the end, unless keep() was
/// called.
class ErrorFiles {
 public:
  ErrorFiles();
  ~ErrorFiles();
  ErrorFiles(const ErrorFiles&) = delete;
  ErrorFiles& operator=(const ErrorFiles&) = delete;

  std::filesystem::path path(int rank) const;

  /// The message in a worker's error file; the whole file when it is no JSON of torch's; empty
  /// when there is none.
  std::string message(int rank) const;

  void keep() { keep_ = true; }
  void remove() const;

 private:
  std::filesystem::path folder_;
  bool keep_ = false;
};

}  // namespace syncbn::launch
