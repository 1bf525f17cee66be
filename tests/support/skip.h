#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/base/env.h>

#include <string>
#include <string_view>

namespace syncbn::test {

/// Whether the lack of `need` skips a test. In CI (CI=true) it fails the test instead, unless the
/// comma-separated list SYNCBN_ALLOW_SKIP contains `need`.
inline bool may_skip(std::string_view need) {
  if (base::env("CI") != "true") return true;
  const auto allowed = fmt::format(",{},", base::env("SYNCBN_ALLOW_SKIP").value_or(""));
  return allowed.find(fmt::format(",{},", need)) != std::string::npos;
}

}  // namespace syncbn::test

/// The first line of a test that needs something a machine may lack. Skips it with "needs: <name>".
#define SYNCBN_SKIP_UNLESS(condition, name)                                              \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      if (::syncbn::test::may_skip(name)) GTEST_SKIP() << "needs: " << (name);           \
      FAIL() << "needs: " << (name) << " (in CI a skip has to be allowed by its name in" \
             << " SYNCBN_ALLOW_SKIP)";                                                   \
    }                                                                                    \
  } while (false)
