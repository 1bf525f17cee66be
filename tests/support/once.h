#pragma once

#include <gtest/gtest.h>
#include <syncbn/base/env.h>

#include <filesystem>
#include <functional>
#include <string>

namespace syncbn::test {

/// A file or folder for several tests, which read or copy it. `make` gets the path at which to make
/// it, in the first of these tests only, although each test runs in its own process.
inline std::filesystem::path once(const std::string& name,
                                  const std::function<void(const std::string& path)>& make) {
  const std::filesystem::path made =
      std::filesystem::path(base::env("SYNCBN_SUITE_FOLDER").value()) / name;
  if (std::filesystem::exists(made)) return made;
  const std::filesystem::path part = made.string() + ".part";
  std::filesystem::remove_all(part);
  make(part);
  // After a failure, the next test tries again.
  if (::testing::Test::HasFailure()) return part;
  std::filesystem::rename(part, made);
  return made;
}

}  // namespace syncbn::test
