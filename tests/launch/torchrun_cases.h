#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "support/multiproc.h"
#include "support/python.h"

namespace syncbn::test {

using Environment = std::map<std::string, std::string>;

inline RunProgramOptions options_in(const TempFolder& folder, const Environment& env = {}) {
  RunProgramOptions options{.env = env, .cwd = folder.path()};
  options.env.insert({{"OMP_NUM_THREADS", "1"}, {"PYTHON_EXEC", python()}});
  return options;
}

inline std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename());
  return names;
}

/// The log folder of the first attempt of the only run in `logs`.
inline std::filesystem::path attempt_in(const std::filesystem::path& logs) {
  const auto runs = names_in(logs);
  EXPECT_EQ(runs.size(), 1U);
  return logs / (runs.empty() ? "" : *runs.begin()) / "attempt_0";
}

inline std::string text_of(const std::filesystem::path& file) {
  return std::filesystem::exists(file) ? base::read_file(file) : "no file";
}

}  // namespace syncbn::test
