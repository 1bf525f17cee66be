#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> short_run(const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = {"--config", shipped_config("digits.yaml"), "--epochs=1"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(RunFolderProgramTest, NumbersRunsOfOneConfigurationByDefault) {
  const TempFolder cwd;
  for (const char* run : {"runs/digits", "runs/digits-2", "runs/digits-3"}) {
    const auto result = run_train(short_run(), {}, cwd.path().string());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr(std::string("writes to ") + run + "\n"));
    for (const char* file : {"config.yaml", "log.jsonl", "last.pt", "best.pt", "result.json"}) {
      EXPECT_TRUE(std::filesystem::exists(cwd.path() / run / file)) << run << "/" << file;
    }
  }
}

TEST(RunFolderProgramTest, DoesNotReplaceARunUnasked) {
  const TempFolder folder;
  ASSERT_EQ(run_train(short_run({"--run_dir", folder / "run"})).exit_code, 0);
  const std::string log = base::read_file(folder / "run/log.jsonl");
  const auto refused = run_train(short_run({"--run_dir", folder / "run"}));
  EXPECT_EQ(refused.exit_code, base::kExitUsage);
  EXPECT_EQ(count(refused.err, "error:"), 1) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("already holds a run"));
  EXPECT_EQ(base::read_file(folder / "run/log.jsonl"), log);
  const auto replaced = run_train(short_run({"--run_dir", folder / "run", "--overwrite"}));
  EXPECT_EQ(replaced.exit_code, 0) << replaced.err;
  EXPECT_EQ(count(base::read_file(folder / "run/log.jsonl"), "\"start\""), 1);
}

}  // namespace
}  // namespace syncbn::test
