#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <filesystem>

#include "e2e/quiet_exits.h"
#include "e2e/train_program.h"
#include "support/listener.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

/// A run that must fail with one message and leave nothing behind.
class BadInputTest : public ::testing::Test {
 protected:
  /// Runs `train` on the digits' configuration with `text` appended, as `bad.yaml`.
  ProgramResult train_with(const std::string& text, const Words& args = {}) {
    base::write_file_atomically(inputs_ / "bad.yaml",
                                base::read_file(shipped_config("digits.yaml")) + text);
    return train_on(inputs_ / "bad.yaml", args);
  }

  ProgramResult train_on(const std::string& config, const Words& args = {}, const Env& env = {}) {
    return run_train(Words{"--config", config, "--run_dir", run_dir()} + args, env);
  }

  std::string run_dir() const { return outputs_ / "run"; }

  void expect_one_message(const ProgramResult& result, int exit_code, const std::string& message) {
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_EQ(count(result.err, "error:"), 1) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_TRUE(outputs_.empty()) << "the run's folder was begun";
  }

  TempFolder inputs_;
  TempFolder outputs_;
};

// ctest runs each suite as one entry; this alias splits the file into two, which run in parallel.
using BadRankTest = BadInputTest;

TEST_F(BadInputTest, NamesAConfigurationThatIsNotThere) {
  expect_one_message(train_on("/nowhere/digits.yaml"), base::kExitUsage,
                     "cannot read /nowhere/digits.yaml: No such file");
}

TEST_F(BadInputTest, DoesNotCallALoopOfLinksMissing) {
  std::filesystem::create_symlink("loop.yaml", inputs_ / "loop.yaml");
  expect_one_message(train_on(inputs_ / "loop.yaml"), base::kExitUsage,
                     "loop.yaml: Too many levels of symbolic links");
}

TEST_F(BadInputTest, ReadsAPipeOnce) {
  const auto result = run_program({"bash", "-c", "\"$0\" --config <(cat \"$1\") --print_config",
                                   SYNCBN_BIN_DIR "/train", shipped_config("digits.yaml")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("model:"));
  // With several threads, a run starts the program anew if it can.
  const auto trained = run_program(
      {"bash", "-c", "\"$0\" --config <(cat \"$1\") --run_dir \"$2\" --max_steps=1 --threads=2",
       SYNCBN_BIN_DIR "/train", shipped_config("digits.yaml"), run_dir()},
      {.unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}});
  EXPECT_EQ(trained.exit_code, 0) << trained.err;
}

TEST_F(BadInputTest, NamesTheConfigurationThatWasMeant) {
  base::write_file_atomically(inputs_ / "digits.yaml", "");
  base::write_file_atomically(inputs_ / "best.pt", "PK");
  expect_one_message(train_on(inputs_ / "digit.yaml"), base::kExitUsage,
                     "No such file; did you mean 'digits.yaml'?");
  expect_one_message(train_on(inputs_ / "best.pt"), base::kExitUsage,
                     "best.pt holds weights; name a YAML file");
}

TEST_F(BadInputTest, SaysWhatToDoWhereTheProgramBehindTrainIsMissing) {
  std::filesystem::create_directory(inputs_ / "bin");
  std::filesystem::copy_file(SYNCBN_BIN_DIR "/train", inputs_ / "bin/train");
  const auto result = run_program({inputs_ / "bin/train", "--version"});
  EXPECT_EQ(result.exit_code, base::kExitCannotExecute);
  EXPECT_EQ(result.err, "train: error: cannot execute " +
                            (inputs_ / "libexec/syncbn/train_program").string() +
                            ": No such file or directory; if a build is making it, start again "
                            "afterwards, otherwise install train again\n");
}

TEST_F(BadInputTest, NamesAWorkingDirectoryThatIsGone) {
  const std::string folder = inputs_ / "gone";
  std::filesystem::create_directory(folder);
  const auto result =
      run_program({"sh", "-c", R"(cd "$0" && rmdir "$0" && exec "$@")", folder,
                   SYNCBN_BIN_DIR "/syncbn-launch", "--nproc_per_node=2", SYNCBN_BIN_DIR "/train",
                   "--config", shipped_config("digits.yaml"), "--run_dir", run_dir()});
  EXPECT_EQ(count(result.err, "the working directory is gone; change to another one"), 1)
      << result.err;
  EXPECT_EQ(result.exit_code, base::kExitUsage);
}

TEST_F(BadInputTest, AsksForAConfiguration) {
  expect_one_message(run_train({}), base::kExitUsage, "--config FILE");
}

TEST_F(BadInputTest, TheLaunchersQuestionNamesWhatIsKnownWithoutData) {
  const auto ask = [&](const Words& words) {
    return run_train(Words{"--check_options"} + words, rank_env(0, 2, free_port()));
  };
  const std::string config = "--config=" + shipped_config("digits.yaml");
  for (const Words& command : {Words{}, {"eval"}, {"check"}, {"export"}}) {
    expect_one_message(ask(command + Words{config, "--epohcs=1"}), base::kExitUsage,
                       "did you mean '--epochs'?");
    EXPECT_EQ(ask(command + Words{config}).exit_code, 0);
  }
  const std::string link = inputs_ / "link.pt";
  std::filesystem::create_symlink("none.pt", link);
  // Rank 0 will read these files. Only training and check read `init`.
  for (const auto& [words, message] : std::vector<std::pair<Words, std::string>>{
           {{config, "--init=none.pth"}, "--init: cannot read none.pth: No such file"},
           {{config, "--pretrained", "none.pth"}, "--pretrained: init: cannot read none.pth"},
           {{"check", config, "--init=none.pth"}, "--init: cannot read none.pth"},
           {{config, "--resume=none.pt"}, "--resume: cannot read none.pt: No such file"},
           {{config, "--resume=" + link},
            "link.pt: it is a link to 'none.pt', which does not exist"},
           {{"eval", config, "--resume=none.pt"}, "--resume: cannot read none.pt"}}) {
    expect_one_message(ask(words), base::kExitUsage, message);
  }
  for (const Words& words : {Words{config, "--init=none.pth", "--resume=auto"},
                             {"eval", config, "--init=none.pth"},
                             {config, "--init=" + shipped_config("digits.yaml")}}) {
    EXPECT_EQ(ask(words).exit_code, 0);
  }
  EXPECT_EQ(run_train({"--check_options", config, "--init=none.pth"}, rank_env(1, 2, free_port()))
                .exit_code,
            0);
  // Only the node of rank 0 needs the file, and with c10d any node may become that.
  for (const bool is_known : {true, false}) {
    const auto result =
        run_program({SYNCBN_BIN_DIR "/syncbn-launch", "--nnodes=2", "--rdzv_conf=join_timeout=1",
                     is_known ? "--node_rank=0" : "--rdzv_backend=c10d",
                     fmt::format("--rdzv_endpoint=127.0.0.1:{}", free_port()),
                     SYNCBN_BIN_DIR "/train", config, "--init=none.pth"});
    EXPECT_EQ(count(result.err, "cannot read none.pth"), is_known ? 1 : 0) << result.err;
    EXPECT_NE(result.exit_code, 0);
  }
  // A warning: other nodes may have other numbers of workers.
  const auto warned = ask({config, "--global_batch_size=7"});
  EXPECT_EQ(warned.exit_code, 0);
  EXPECT_EQ(warned.err,
            "train: warning: if 2 ranks take part: global_batch_size: 7 samples cannot be divided "
            "evenly between 2 "
            "ranks; choose a multiple of 2\n");
}

TEST_F(BadInputTest, NamesAPathInPlaceOfARun) {
  expect_one_message(run_train({"eval", "runs/none"}), base::kExitUsage,
                     "eval: runs/none does not exist; name a run's folder or a YAML file");
  expect_one_message(run_train({inputs_.path()}), base::kExitUsage, "is no run and no YAML file");
  expect_one_message(run_train({"eval", "none"}), base::kExitUsage,
                     "eval: none does not exist; name a run's folder or a YAML file");
  expect_one_message(run_train({"resume", "none"}), base::kExitUsage,
                     "train has no command 'resume'; to resume a run, write `train runs/NAME`");
  expect_one_message(run_train({"predict", "runs/none"}), base::kExitUsage,
                     "name an image or a folder of them, then the run: train predict IMAGES");
  expect_one_message(run_train({"predict", "runs/none", inputs_.path()}), base::kExitUsage,
                     "is no run and no YAML file; the images come first");
  std::filesystem::create_directories(inputs_ / "photos/train");
  for (const Words& words : {Words{"eval"}, {"predict", inputs_ / "photos"}}) {
    expect_one_message(run_train(words + Words{inputs_ / "photos"}), base::kExitUsage,
                       "photos is a folder of data, no run; ");
  }
  base::write_file_atomically(inputs_ / "runs/one/log.jsonl", "");
  expect_one_message(run_train({"eval", inputs_ / "runs"}), base::kExitUsage,
                     "runs/one, and is none; name a run's folder or a YAML file");
  // A folder of runs is for `compare`.
  expect_one_message(run_train({"compare", inputs_.path()}), base::kExitUsage, "holds no run");
}

TEST_F(BadInputTest, KnowsWhatOtherProgramsCallAKey) {
  expect_one_message(train_with("\nlearning_rate: 0.1\n"), base::kExitUsage,
                     "unknown key 'learning_rate'; did you mean 'optimizer.lr'?");
  expect_one_message(run_train({"--config=" + shipped_config("digits.yaml"), "--num_epochs=3"}),
                     base::kExitUsage, "unknown option '--num_epochs'; did you mean '--epochs'?");
}

TEST_F(BadInputTest, SaysAllFaultsOfFileAndCommandLineInOneMessage) {
  const auto result =
      train_with("\nlog_intervall: 3\neval_interval: 0\n", {"--optimizer.lr=-1", "--sed=4"});
  expect_one_message(result, base::kExitUsage, "unknown option '--sed'");
  for (const char* part : {"eval_interval: must be", "optimizer.lr: must be"}) {
    EXPECT_THAT(result.err, HasSubstr(part));
  }
  EXPECT_THAT(result.err,
              ::testing::ContainsRegex(
                  "bad.yaml:[0-9]+:1: unknown key 'log_intervall'; did you mean 'log_interval'"));
}

TEST_F(BadRankTest, NamesWhatRanksWereNotStartedAlikeWith) {
  shorten_quiet_exits();
  const int port = free_port();
  const auto start = [&](int rank, const Words& more) {
    return start_train(digits(run_dir(), more), rank_env(rank, 3, port));
  };
  const auto first = start(0, {});
  // Paths and numbers of threads may differ between ranks.
  const auto second =
      start(1, {"--threads=2", "--data.path", SYNCBN_SOURCE_DIR "/data/digits.csv.gz"});
  const auto third = start(2, {"--batch_size=16", "--optimizer.lr=0.2"});
  const auto result = first->wait();
  expect_one_message(result, base::kExitUsage, "the ranks were not started alike");
  EXPECT_THAT(result.err,
              ::testing::ContainsRegex("batch_size: 8 on rank 0 \\(.+\\), 16 on rank 2 \\(.+\\); "
                                       "optimizer.lr: 0.1 on rank 0"));
  EXPECT_EQ(count(result.err, " on rank 0 "), 2) << result.err;
  for (const auto& other : {second.get(), third.get()}) {
    const auto quiet = other->wait();
    EXPECT_EQ(quiet.exit_code, base::kExitUsage);
    EXPECT_EQ(quiet.err, "");
  }
}

TEST_F(BadRankTest, NamesBothNumbersOfAnIndivisibleBatch) {
  expect_one_message(train_on(shipped_config("digits.yaml"),
                              {"--batch_size=null", "--global_batch_size=10"}, rank_env(0, 4, 1)),
                     base::kExitUsage, "10 samples cannot be divided evenly between 4 ranks");
}

TEST_F(BadInputTest, SaysWhereARelativePathOfDataStarts) {
  expect_one_message(
      run_train(digits(run_dir(), {"--data.path=here/digits.csv.gz"}), {}, inputs_.path()),
      base::kExitUsage,
      "No such file or directory; choose another path (it is relative to the working folder, " +
          inputs_.path().string() +
          "; start where it leads to the data, set data.path=/ABSOLUTE/PATH, or write "
          "${here}/here/digits.csv.gz for");
  const auto absolute = run_train(digits(run_dir(), {"--data.path=/nowhere/digits.csv.gz"}));
  expect_one_message(absolute, base::kExitUsage, "/nowhere/digits.csv.gz");
  EXPECT_THAT(absolute.err, ::testing::Not(HasSubstr("is relative")));
}

TEST_F(BadInputTest, SaysWhereAMissingFolderOfDataWasWritten) {
  const std::string file = inputs_.write("images.yaml",
                                         "batch_size: 8\n"
                                         "model: digits\n"
                                         "data:\n"
                                         "  type: image_folder\n"
                                         "  train: /nowhere/train\n");
  expect_one_message(run_train({"--config", file}), base::kExitUsage,
                     file +
                         ":5:10: data.train: cannot read the image folder '/nowhere/train': "
                         "No such file or directory");
  expect_one_message(run_train({"check", "--config", file, "--data.train=/elsewhere"}),
                     base::kExitUsage, "--data.train: cannot read the image folder '/elsewhere'");
  expect_one_message(train_on(shipped_config("digits.yaml"), {"--accumulate=3"}), base::kExitUsage,
                     "--accumulate: a rank's batch of");
}

TEST_F(BadInputTest, NamesARunsConfigurationThatIsCutOff) {
  ASSERT_EQ(train_on(shipped_config("digits.yaml"), {"--max_steps=1"}).exit_code, 0);
  const std::filesystem::path file = std::filesystem::path(run_dir()) / "config.yaml";
  const std::string whole = base::read_file(file);
  for (const std::string& damaged :
       {whole.substr(0, whole.find("type: digits") + 8), std::string(), std::string(100, '\0')}) {
    base::write_file_atomically(file, damaged);
    const auto result = run_train({"eval", run_dir()});
    EXPECT_EQ(result.exit_code, base::kExitUsage);
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    EXPECT_THAT(result.err, HasSubstr("config.yaml"));
    EXPECT_THAT(result.err, HasSubstr("the run's own configuration is damaged or missing: give the "
                                      "one that it was started with, --config FILE --run_dir " +
                                      run_dir()));
  }
  EXPECT_EQ(run_train(Words{"eval"} + digits(run_dir())).exit_code, 0);
  // An editor may leave out the last newline.
  base::write_file_atomically(file, whole.substr(0, whole.size() - 1));
  EXPECT_EQ(run_train({"eval", run_dir()}).exit_code, 0);
  base::write_file_atomically(inputs_ / "other.yaml", "a: [\n");
  const auto other = run_train({"eval", "--config", inputs_ / "other.yaml", "--config", file});
  EXPECT_THAT(other.err, HasSubstr("other.yaml:"));
  EXPECT_THAT(other.err, ::testing::Not(HasSubstr("the run's own configuration")));
}

TEST_F(BadInputTest, NamesTheLimitWhereAThreadCannotStart) {
  expect_one_message(train_on(shipped_config("digits.yaml"), {},
                              {{"LD_PRELOAD", SYNCBN_SLOW_STARTS}, {"SLOW_STARTS_THREADS", "3"}}),
                     base::kExitUnavailable, "(ulimit -u)");
}

TEST_F(BadInputTest, CountsTheThreadsOfAllRanks) {
  // One rank of `train` needs 1 + 8 threads.
  Env env = rank_env(0, 8, 1);
  env["LD_PRELOAD"] = SYNCBN_SLOW_STARTS;
  env["SLOW_STARTS_THREADS"] = "71";
  expect_one_message(train_on(shipped_config("digits.yaml"), {"--loader.num_workers=0"}, env),
                     base::kExitUnavailable, "cannot start 72 threads");
}

TEST_F(BadInputTest, NamesTheLimitOfOpenFiles) {
  const auto result = run_program(
      Words{"sh", "-c", "ulimit -n 6; exec \"$@\"", "sh", program("train")} + digits(run_dir()),
      {.env = {{"OMP_NUM_THREADS", "1"}}});
  expect_one_message(result, base::kExitUnavailable,
                     "failed: Too many open files; this process may have 6 (ulimit -n)");
}

TEST_F(BadInputTest, SaysThatAFileIsTooLarge) {
  const auto result =
      run_program(Words{"sh", "-c", "ulimit -f 8; exec \"$@\"", "sh", program("train")} +
                      digits(run_dir(), {"--epochs=1"}),
                  {.env = {{"OMP_NUM_THREADS", "1"}}});
  EXPECT_EQ(result.exit_code, base::kExitUnavailable) << result.err;
  EXPECT_EQ(count(result.err, "error:"), 1) << result.err;
  EXPECT_THAT(result.err, HasSubstr("File too large"));
}

TEST_F(BadRankTest, RefusesMoreRanksThanSamples) {
  expect_one_message(
      train_on(shipped_config("digits.yaml"),
               {"--sampler=distributed", "--data=synthetic", "--data.size=3"}, rank_env(0, 4, 1)),
      base::kExitUsage, "3 samples are too few for 4 ranks");
  // Neither rank waits for the other.
  const auto two =
      launch_train(2, digits(run_dir(), {"--data=synthetic", "--data.size=1", "--epochs=1"}));
  EXPECT_EQ(two.exit_code, base::kExitUsage) << two.err;
  EXPECT_EQ(count(two.out + two.err, "train: error:"), 1) << two.out << two.err;
  EXPECT_THAT(two.out + two.err, HasSubstr("rank 1 of 2 has no sample"));
  EXPECT_TRUE(outputs_.empty());
}

TEST_F(BadRankTest, SaysAFaultOnceForAllRanksOfANode) {
  const auto result = launch_train(3, digits(run_dir(), {"--epochs=0"}));
  EXPECT_EQ(result.exit_code, base::kExitUsage) << result.err;
  EXPECT_EQ(count(result.out + result.err, "epochs: must be at least 1"), 1)
      << result.out << result.err;
  EXPECT_TRUE(outputs_.empty());
}

TEST_F(BadRankTest, NamesAPatternOfAGroupThatMatchesNoParameterOnceForAllRanks) {
  const std::string groups = "[{match: fc.*, lr: 0.1}, {match: head*, lr: 0.1}]";
  const auto result = launch_train(2, digits(run_dir(), {"--optimizer.groups=" + groups}));
  expect_one_message(result, base::kExitUsage,
                     "optimizer.groups.1.match: 'head*' matches no parameter; the model has ");
}

TEST_F(BadInputTest, RefusesAnEmptyNameOfAConfiguration) {
  for (const Words& args : {Words{"--config="}, Words{"--config", ""}}) {
    expect_one_message(run_train(args), base::kExitUsage, "the option '--config' needs a value");
  }
}

TEST_F(BadInputTest, SaysThatMemoryIsShort) {
  // More than the address space: fails even if the kernel overcommits memory.
  const auto result =
      train_on(shipped_config("digits.yaml"),
               {"--data=synthetic", "--data.size=2000000", "--batch_size=2000000",
                "--data.height=4000", "--data.width=4000", "--sampler=distributed"});
  expect_mistake(result, "not enough memory for 384000000000000 bytes");
}

TEST_F(BadRankTest, SaysOnceForAllRanksWhyAFolderCannotBeMade) {
  const TempFolder folder;
  base::write_file_atomically(folder / "file", "");
  for (const std::string path : {folder / "file/run", folder / std::string(300, 'x'),
                                 std::filesystem::path("/proc/nowhere")}) {
    SCOPED_TRACE(path);
    const auto result = launch_train(3, digits(path));
    expect_mistake(result, "cannot create the folder " + path);
    EXPECT_THAT(result.out + result.err, HasSubstr("rank 0 exited with 2"));
  }
}

TEST_F(BadRankTest, SendsTheOtherRanksAwayWithTheCodeOfRank0) {
  shorten_quiet_exits();
  auto ranks = start_ranks(2, digits("/dev/full"));
  const auto results = wait_for(ranks);
  for (const ProgramResult& result : results) EXPECT_EQ(result.exit_code, base::kExitUsage);
  EXPECT_EQ(count(results[0].err, "error:"), 1) << results[0].err;
  EXPECT_EQ(results[1].err, "");
}

TEST_F(BadRankTest, SaysAFaultOfTheEnvironmentOnceForAllRanks) {
  const auto log = start_launched_train(3, digits(run_dir()), {{"SYNCBN_LOG", "chatty"}});
  expect_mistake(log->wait(), "SYNCBN_LOG=chatty");
  const auto backend = start_launched_train(3, digits(run_dir(), {"--backend=nccl"}),
                                            {{"CUDA_VISIBLE_DEVICES", ""}});
  expect_mistake(backend->wait(), "backend nccl (device cuda) needs a GPU");
  EXPECT_TRUE(outputs_.empty());
}

TEST_F(BadRankTest, SaysOnAnyRankWhatIsWrongWithItsRank) {
  shorten_quiet_exits();
  Env env = rank_env(1, 2, 1);
  env["RANK"] = "one";
  expect_one_message(train_on(shipped_config("digits.yaml"), {}, env), base::kExitUsage,
                     "RANK=one");
}

TEST_F(BadRankTest, AsksForRankAndWorldSizeTogether) {
  expect_one_message(train_on(shipped_config("digits.yaml"), {}, {{"RANK", "0"}}), base::kExitUsage,
                     "the environment sets RANK=0 but not WORLD_SIZE");
  expect_one_message(train_on(shipped_config("digits.yaml"), {}, {{"WORLD_SIZE", "4"}}),
                     base::kExitUsage, "the environment sets WORLD_SIZE=4 but not RANK");
  expect_one_message(
      train_on(shipped_config("digits.yaml"), {}, {{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
      base::kExitUsage, "RANK=2 is not below WORLD_SIZE=2");
}

TEST_F(BadRankTest, LetsOtherLocalRanksLeaveInSilence) {
  shorten_quiet_exits();
  const auto result = train_on(shipped_config("digits.yaml"), {"--epochs=0"}, rank_env(1, 2, 1));
  EXPECT_EQ(result.exit_code, base::kExitUsage);
  EXPECT_EQ(result.out + result.err, "");
}

TEST_F(BadRankTest, SaysWhatIsWrongOnOneRankOnly) {
  shorten_quiet_exits();
  const auto result =
      run_program(Words{program("syncbn-launch"), "--standalone", "--nproc_per_node=2", "sh", "-c",
                        "exec \"$@\" --epochs=$((1 - RANK))", "sh", program("train")} +
                  digits(run_dir()));
  EXPECT_EQ(result.exit_code, base::kExitUsage) << result.err;
  EXPECT_EQ(count(result.out + result.err, "epochs: must be at least 1"), 1)
      << result.out << result.err;
}

TEST_F(BadRankTest, GivesUpWhenNobodyAnswersAtTheMastersAddress) {
  const int port = free_port();
  const auto result =
      train_on(shipped_config("digits.yaml"), {"--connect_timeout=2"}, rank_env(1, 2, port));
  expect_one_message(result, base::kExitUnavailable, "127.0.0.1:" + std::to_string(port));
}

TEST_F(BadRankTest, NamesAPortThatIsInUse) {
  const Listener listener;
  const auto result = train_on(shipped_config("digits.yaml"), {"--connect_timeout=5"},
                               rank_env(0, 2, listener.port));
  expect_one_message(result, base::kExitUnavailable, std::to_string(listener.port));
}

TEST_F(BadRankTest, FindsTwoWorkersWithOneRank) {
  const int port = free_port();
  const Words args = digits(run_dir(), {"--sampler=distributed", "--connect_timeout=100"});
  std::vector<std::unique_ptr<Program>> workers;
  for (const int rank : {0, 1, 1}) {
    Env env = rank_env(rank, 3, port);
    env["LOCAL_RANK"] = "0";
    env["LOCAL_WORLD_SIZE"] = "1";
    workers.push_back(start_train(args, env));
  }
  std::string said;
  int usage = 0;
  for (const ProgramResult& result : wait_for(workers)) {
    EXPECT_NE(result.exit_code, 0);
    EXPECT_EQ(count(result.err, "error:"), 1) << result.err;
    if (result.exit_code == base::kExitUsage) ++usage;
    said += result.err;
  }
  EXPECT_GE(usage, 1) << said;
  EXPECT_THAT(said, HasSubstr("rank 1"));
  EXPECT_TRUE(outputs_.empty());
}

TEST_F(BadRankTest, StopsAllRanksWhenTheLossIsNotFinite) {
  shorten_quiet_exits();
  auto ranks = start_ranks(2, digits(run_dir(), {"--optimizer.lr=1e6"}));
  const auto results = wait_for(ranks);
  for (const ProgramResult& result : results) EXPECT_EQ(result.exit_code, base::kExitUnavailable);
  EXPECT_EQ(count(results[0].err, "error:"), 1) << results[0].err;
  EXPECT_THAT(results[0].err, HasSubstr("not finite in step "));
  EXPECT_THAT(results[0].err, HasSubstr("nothing was saved yet"));
  EXPECT_EQ(results[1].err, "");
  EXPECT_FALSE(std::filesystem::exists(run_dir() + "/result.json"));
}

}  // namespace
}  // namespace syncbn::test
