#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/config/yaml.h>

#include "e2e/log_lines.h"
#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class DigitsTest : public ::testing::TestWithParam<int> {};

// The purpose of the project: on class-skewed shards, training succeeds with synchronised
// statistics and fails with those of each rank.
TEST_P(DigitsTest, SyncBatchNormLearnsWhereBatchNormOfEachRankDoesNot) {
  const TempFolder folder;
  const auto accuracy = [&](const std::string& config) {
    const std::string run_dir = folder / config;
    const auto result = launch_train(4, {"--config", shipped_config(config), "--run_dir", run_dir,
                                         "--seed", std::to_string(GetParam())});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.exit_code == 0 ? result_of(run_dir) : nlohmann::json();
  };
  const auto sync = accuracy("digits.yaml");
  const auto local = accuracy("digits-local-bn.yaml");
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(sync["world_size"], 4);
  EXPECT_EQ(sync["seed"], GetParam());
  for (const char* measure : {"test_accuracy", "best_test_accuracy"}) {
    const double with = sync[measure];
    const double without = local[measure];
    EXPECT_GE(with, 0.98) << measure;
    EXPECT_GE(with - without, 0.04) << measure << " of batch norm of each rank: " << without;
  }
}

INSTANTIATE_TEST_SUITE_P(Seed, DigitsTest, ::testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Exhaustive, DigitsTest, ::testing::Values(1, 2));

TEST(TrainProgramTest, LearnsTheSameInEachMemoryFormat) {
  const TempFolder folder;
  const auto loss = [&](const std::string& format, const Words& more = {}) {
    const std::string run_dir = folder / (format + std::to_string(more.size()));
    const auto result =
        run_train(digits(run_dir, {"--epochs", "1", "--memory_format", format}) + more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result_of(run_dir)["train_loss"].get<double>();
  };
  const double channels_last = loss("channels_last");
  EXPECT_NEAR(loss("contiguous"), channels_last, 0.02 * channels_last);
  EXPECT_EQ(loss("auto"), channels_last);
  // Both formats resume from the contiguous run's checkpoint.
  const auto second_epoch = [&](const std::string& format) {
    return loss(format, {"--resume", folder / "contiguous0/last.pt", "--epochs", "2"});
  };
  const double second = second_epoch("contiguous");
  EXPECT_LT(second, channels_last / 2);
  EXPECT_NEAR(second_epoch("channels_last"), second, 0.05 * second);
}

TEST(TrainProgramTest, WritesOneJsonLinePerEpochAndItsEnds) {
  const TempFolder folder;
  const auto result = run_train(digits(folder / "run", {"--epochs", "3", "--eval_interval", "2"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  auto lines = log_of(folder / "run");
  std::erase_if(lines, [](const nlohmann::json& line) {
    return line["event"].get<std::string>().starts_with("step");
  });
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[0]["event"], "start");
  EXPECT_EQ(lines[0]["total_steps"], lines[3]["step"]);
  for (int epoch : {1, 2, 3}) {
    EXPECT_EQ(lines[static_cast<size_t>(epoch)]["epoch"], epoch);
    EXPECT_EQ(lines[static_cast<size_t>(epoch)].contains("test_accuracy"), epoch != 1);
  }
  EXPECT_EQ(lines[4]["reason"], "finished");
}

TEST(TrainProgramTest, IgnoresTheLocalRankThatOldLaunchersPass) {
  const TempFolder folder;
  for (const char* option : {"--local_rank=0", "--local-rank=0"}) {
    const auto result =
        run_train(Words{option} + digits(folder / "run", {"--epochs", "1", "--overwrite"}));
    EXPECT_EQ(result.exit_code, 0) << option << result.err;
  }
}

TEST(TrainProgramTest, PrintsAResolvedConfigurationThatItReadsBack) {
  const TempFolder folder;
  const auto first =
      run_train(digits("runs/$${no reference}", {"--optimizer.type", "adamw", "--print-config"}));
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.out,
              ::testing::AllOf(HasSubstr("type: adamw"), HasSubstr("runs/$${no reference}")));
  base::write_file_atomically(folder / "again.yaml", first.out);
  const auto second = run_train({"--config", folder / "again.yaml", "--print_config"});
  EXPECT_EQ(second.exit_code, 0) << second.err;
  const auto values_of = [](const ProgramResult& result) {
    return config::to_yaml(config::parse_yaml(result.out, "printed"));
  };
  EXPECT_EQ(values_of(second), values_of(first));
}

TEST(TrainProgramTest, PrintsWhereEachValueWasWritten) {
  const TempFolder folder;
  base::write_file_atomically(folder / "a.yaml", "base: " + shipped_config("digits.yaml") +
                                                     "\nepochs: 3\nlog_interval: ${epochs}\n");
  base::write_file_atomically(folder / "b.yaml", "schedule: {type: step, step_size: 2}\n");
  const auto result = run_train({"--config", folder / "a.yaml", "--config", folder / "b.yaml",
                                 "optimizer.lr=0.25", "--print_config"},
                                {}, folder.path());
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Words lines = {"epochs: 3 +# .*/a.yaml:2",
                       "log_interval: 3 +# .*/a.yaml:3",
                       "  step_size: 2 +# .*/b.yaml:1",
                       "  lr: 0.25 +# optimizer.lr",
                       "  momentum: 0.9 +# .*/digits.yaml:[0-9]+",
                       "  nesterov: false +# default"};
  for (const std::string& line : lines) EXPECT_THAT(result.out, ContainsRegex(line));
}

TEST(TrainProgramTest, TellsItsVersion) {
  const auto result = run_train({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, ContainsRegex("^train [0-9.]+( [0-9a-f-]+)?, libtorch 2[0-9.]+\n$"));
}

TEST(TrainProgramTest, HelpListsEveryKey) {
  const std::string whole = run_train({"--help"}).out;
  EXPECT_THAT(whole, HasSubstr("--config FILE"));
  EXPECT_THAT(whole, HasSubstr(", epochs, "));
  EXPECT_LT(count(whole, "\n"), 60) << "a screenful";
  EXPECT_EQ(run_train({"help"}).out, whole);
  const std::string keys = run_train({"--help", "keys"}).out;
  for (const char* key : {"--epochs integer", "--ddp  ", "adam, adamw, "}) {
    EXPECT_THAT(keys, HasSubstr(key));
  }
  for (const auto& [name, text] : std::vector<std::pair<std::string, std::string>>{
           {"lr", "--lr is the same as --optimizer.lr=VALUE"},
           {"lr", "--optimizer.lr number"},
           {"--lr", "--lr is the same as --optimizer.lr=VALUE"},
           {"-b", "-b is the same as --batch_size=VALUE"},
           {"dist-url", "--dist_url is the same as --master_addr=HOST --master_port=PORT"},
           {"dry_run", "take a few steps"},
           {"split", "--split: for train eval\n"},
           {"nnodes", "`syncbn-launch --help` explains it"}}) {
    EXPECT_THAT(run_train({"help", name}).out, HasSubstr(text));
  }
  EXPECT_THAT(run_train({"sweep", "-h"}).out, HasSubstr("usage: train sweep "));
  EXPECT_THAT(run_train({"--help", "eval"}).out, HasSubstr("usage: train eval "));
  EXPECT_THAT(
      run_train({"--help", "profile"}).out,
      ::testing::AllOf(HasSubstr("usage: train profile "), HasSubstr("--profile.steps integer")));
  for (const auto& [section, key] : std::vector<std::pair<std::string, std::string>>{
           {"optimizer", "--optimizer.lr number"},
           {"optimizer", "optimizer, type: adamw"},
           {"ddp", "--ddp.broadcast_buffers true|false"}}) {
    const auto result = run_train({"eval", "--config=none.yaml", "--help", section});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.out, HasSubstr(key));
  }
  expect_mistake(run_train({"--help=optimzer"}), "did you mean 'optimizer'?");
  const auto of_another_rank = run_train({"help", "optimzer"}, rank_env(1, 2, /*port=*/1));
  EXPECT_EQ(of_another_rank.exit_code, 0);
  EXPECT_EQ(of_another_rank.out + of_another_rank.err, "");
}

TEST(TrainProgramTest, HelpNeedsNoLibtorch) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "bin");
  const std::string alone = folder / "bin/train";  // without the program that loads libtorch
  std::filesystem::copy_file(program("train"), alone);
  const std::string whole = std::filesystem::path(program("train")).parent_path().parent_path() /
                            "libexec/syncbn/train_program";
  for (const Words& args :
       std::vector<Words>{{"--help"}, {"-h"}, {"help", "optimizer"}, {"watch", "--help"}}) {
    const auto help_by = [&](const std::string& program) {
      const ProgramResult result = run_program(Words{program} + args);
      EXPECT_EQ(result.exit_code, 0) << result.err;
      return result.out;
    };
    EXPECT_EQ(help_by(alone), help_by(whole));
  }
  const ProgramResult other = run_program({alone, "--version"});
  EXPECT_EQ(other.exit_code, base::kExitCannotExecute);
  EXPECT_THAT(other.err, HasSubstr("libexec/syncbn/train_program: No such file or directory"));
}

}  // namespace
}  // namespace syncbn::test
