// Runs that move to PyTorch's scripts and back.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/models/torch_archive.h>
#include <syncbn/models/weights.h>

#include "e2e/train_program.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class PythonRunProgramTest : public ::testing::Test {
 protected:
  std::vector<std::string> args(const std::string& run,
                                const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {"--config=" + shipped_config("digits.yaml"),
                                    "--epochs=1",
                                    "--sampler=distributed",
                                    "--schedule=step",
                                    "--ema.decay=0.9",
                                    "--run_dir=" + path_of(run)};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  ProgramResult export_run(const std::string& run, const std::string& format) const {
    return run_train({"export", "--config=" + path_of(run), "--format=" + format,
                      "--output=" + path_of(format + ".pth")});
  }

  void expect_mistake(const std::vector<std::string>& more, const std::string& message) const {
    const auto result = launch_train(2, args("mistake", more));
    EXPECT_EQ(result.exit_code, base::kExitUsage) << result.err;
    EXPECT_EQ(count(result.out + result.err, "error:"), 1) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
  }

  std::string path_of(const std::string& file) const { return folder_ / file; }

  const TempFolder folder_;
};

TEST_F(PythonRunProgramTest, ExportedRunsGoOnAsTheirCheckpointDoes) {
  ASSERT_EQ(run_train(args("first")).exit_code, 0);
  const auto own = run_train(args("own", {"--epochs=2", "--resume=" + path_of("first/last.pt")}));
  ASSERT_EQ(own.exit_code, 0) << own.err;
  const auto expected = models::read_state_dict(path_of("own/last.pt"));
  for (const std::string format : {"torchvision-run", "imagenet-run"}) {
    const auto exported = export_run("first", format);
    ASSERT_EQ(exported.exit_code, 0) << exported.err;
    EXPECT_THAT(exported.err, HasSubstr("first/last.pt as " + format));
    const std::string file = path_of(format + ".pth");
    const auto resumed = run_train(args(format, {"--epochs=2", "--resume=" + file}));
    ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_THAT(resumed.err, AllOf(HasSubstr("resumes from " + file + " at epoch 2, step 181"),
                                   Not(HasSubstr("warning"))));
    models::StateDict found = models::read_state_dict(path_of(format + "/last.pt"));
    for (const auto& item : expected) {
      EXPECT_TRUE(at::equal(found[item.key()], item.value())) << format << " " << item.key();
    }
    // main.py saves no average: the average begins with the network.
    const auto average = models::read_state_dict(path_of(format + "/last.pt"), "ema");
    const auto averages = models::read_state_dict(path_of("own/last.pt"), "ema");
    const at::Tensor* const weight = averages.find("conv1.weight");
    EXPECT_EQ(at::equal(*average.find("conv1.weight"), *weight), format == "torchvision-run");
  }
}

TEST_F(PythonRunProgramTest, ADifferenceIsWarnedOfOnceAndAMistakeIsOneMessage) {
  ASSERT_EQ(run_train(args("first")).exit_code, 0);
  ASSERT_EQ(export_run("first", "torchvision-run").exit_code, 0);
  const std::string file = path_of("torchvision-run.pth");
  const std::string resume = "--resume=" + file;
  const auto warned = launch_train(
      2, args("other", {resume, "--epochs=2", "--optimizer.lr=0.05", "--schedule.gamma=0.5"}));
  EXPECT_EQ(warned.exit_code, 0) << warned.err;
  EXPECT_EQ(count(warned.err, "was made with another configuration"), 1) << warned.err;
  EXPECT_THAT(warned.err, HasSubstr("optimizer.lr 0.05 (was 0.1), schedule.gamma 0.5 (was 0.1)"));

  expect_mistake({resume, "--optimizer=adamw"},
                 "cannot resume from " + file + ": it was made with optimizer.type sgd");
  expect_mistake({resume, "--model.width=8"}, "of another shape: conv1.weight");
  expect_mistake({resume}, "is at the end of epoch 1 of 1; to train on, raise epochs");
  const std::string whole = base::read_file(file);
  base::write_file_atomically(path_of("cut.pth"), whole.substr(0, whole.size() / 2));
  expect_mistake({"--resume=" + path_of("cut.pth")}, "it is damaged, truncated or another");
  models::Dict weights = models::make_dict();
  models::put(weights, "state_dict", models::make_dict());
  models::write_parts(path_of("weights.pth"), [&](const models::Sink& sink) {
    models::write_torch_archive(weights, sink);
  });
  expect_mistake({"--resume=" + path_of("weights.pth")},
                 "to begin with its weights, set init=" + path_of("weights.pth"));
}

TEST_F(PythonRunProgramTest, OnlyTheEndOfAnEpochIsExported) {
  ASSERT_EQ(run_train(args("run", {"--max_steps=5"})).exit_code, 0);
  const auto exported = export_run("run", "imagenet-run");
  EXPECT_EQ(exported.exit_code, base::kExitUsage);
  EXPECT_EQ(count(exported.err, "error:"), 1) << exported.err;
  EXPECT_THAT(exported.err, AllOf(HasSubstr("cannot export " + path_of("run/last.pt")),
                                  HasSubstr("it is of step 5, within epoch 1")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "imagenet-run.pth"));
}

}  // namespace
}  // namespace syncbn::test
