#include "commands/launching.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "commands/commands.h"
#include "commands/program_options.h"
#include "commands/resolved_config.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> translated(const std::vector<std::string>& args) {
  std::vector<std::string> words;
  for (const TranslatedWords& part : translate_imagenet_options(args)) {
    words.insert(words.end(), part.words.begin(), part.words.end());
  }
  return words;
}

TEST(ImagenetOptionsTest, BecomeKeys) {
  const test::TempFolder folder;
  const std::string data = folder.path().string();
  std::filesystem::create_directory(folder.path() / "train");
  EXPECT_THAT(translated({"--config", "x.yaml", "-a", "resnet50", "-j", "4", "-b", "256", "--lr",
                          "0.1", "--wd=1e-4", "--print-freq", "5", "--epochs", "3", data}),
              ElementsAre("--config", "x.yaml", "--model=resnet50", "--loader.num_workers=4",
                          "--batch_size=256", "--optimizer.lr=0.1", "--optimizer.weight_decay=1e-4",
                          "--log_interval=5", "--epochs", "3", "--data.type=image_folder",
                          "--data.train=" + data + "/train", "--data.val=" + data + "/val"));
  EXPECT_THAT(translated({"--dist-url", "tcp://[::1]:23456", "--world-size", "2", "--rank", "1",
                          "--multiprocessing-distributed"}),
              ElementsAre("--master_addr=[::1]", "--master_port=23456", "--nnodes=2",
                          "--node_rank=1", "--nproc_per_node=auto"));
}

TEST(ImagenetOptionsTest, MayHaveTheirValuesJoinedToALetter) {
  EXPECT_THAT(translated({"-b2", "-j16", "-p=5", "-aresnet18"}),
              ElementsAre("--batch_size=2", "--loader.num_workers=16", "--log_interval=5",
                          "--model=resnet18"));
  // Misspelt names.
  const std::vector<std::string> others = {"-batch", "-accumulate=4", "-x2",     "-1",      "-exp1",
                                           "-jobs4", "-epochs10",     "-batch2", "-print10"};
  EXPECT_EQ(translated(others), others);
}

TEST(ImagenetOptionsTest, MayBeWrittenAsKeys) {
  EXPECT_THAT(translated({"lr=0.1", "--epochs", "wd=2", "workers=4"}),
              ElementsAre("--optimizer.lr=0.1", "--epochs", "wd=2", "--loader.num_workers=4"));
  EXPECT_THAT(translated({"dummy=false", "lr"}), ElementsAre("dummy=false", "lr"));
}

TEST(ImagenetOptionsTest, BelongToEveryCommandWithKeys) {
  for (const char* command : {"train", "check", "eval", "predict", "export", "sweep"}) {
    config::Faults faults;
    const auto line = parse_arguments(command, {"lr=0.1"}, faults);
    EXPECT_TRUE(faults.empty()) << command;
    EXPECT_EQ(line.overrides.find("optimizer")->find("lr")->scalar, "0.1") << command;
  }
  EXPECT_THAT(split_launch_options({"lr=0.1"}).program, ElementsAre("--optimizer.lr=0.1"));
}

TEST(ImagenetOptionsTest, AreNamedAsTypedInMessages) {
  const test::TempFolder folder;
  base::write_file_atomically(folder / "x.yaml", "model: digits\ndata: digits\nbatch_size: 8\n");
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--lr", "x"}, "--lr: optimizer.lr: expected a finite number, got 'x'"},
           {{"lr=x"}, "lr: optimizer.lr: expected a finite number, got 'x'"},
           {{"--wd=x"}, "--wd: optimizer.weight_decay: expected a finite number, got 'x'"},
           {{"--momentum", "x"},
            "--momentum: optimizer.momentum: expected a finite number, got 'x'"},
           {{"--optimizer.momentum", "x"},
            "--optimizer.momentum: expected a finite number, got 'x'"},
           {{"-b", "x"}, "-b: batch_size: expected an integer"},
           {{"-b0"}, "-b0: batch_size: must be at least 1"},
           {{"-j", "-3"}, "-j: loader.num_workers: must be at least 0, at most 1024, got -3"},
           {{"--arch", "nosuch"}, "--arch: model.type: unknown"},
           {{"-p", "-1"}, "-p: log_interval: must be"},
           {{"--gpu", "x"}, "--gpu: device: must be auto, cpu, cuda or cuda:N, got cuda:x"},
           {{"--dist-backend=mpi"}, "--dist-backend: backend: must be one of auto, gloo, nccl"},
           // The last value counts, in either spelling.
           {{"--lr", "x", "--optimizer.lr", "y"},
            "--optimizer.lr: expected a finite number, got 'y'"},
           {{"--optimizer.lr", "y", "--lr", "x"},
            "--lr: optimizer.lr: expected a finite number"}}) {
    config::Faults faults;
    std::vector<std::string> all = {"--config", folder / "x.yaml"};
    all.insert(all.end(), words.begin(), words.end());
    const auto line = parse_arguments(kTraining, all, faults);
    EXPECT_THAT(test::message_of<base::UserError>([&] { resolve_config(line, faults); }),
                ::testing::StartsWith(message));
  }
}

TEST(ImagenetOptionsTest, ReachTheRanksAsTyped) {
  const test::TempFolder folder;
  const std::string data = folder.path().string();
  std::filesystem::create_directory(folder / "train");
  const LaunchRequest parts =
      split_launch_options({"--lr", "0.1", "-b2", "--overwrite", "--rank", "0", "wd=1", data,
                            "--epochs=3", "--multiprocessing-distributed"});
  EXPECT_THAT(parts.typed,
              ElementsAre("--lr", "0.1", "-b2", "--overwrite", "--optimizer.weight_decay=1",
                          "--data.type=image_folder", "--data.train=" + data + "/train",
                          "--data.val=" + data + "/val", "--epochs=3"));
  EXPECT_THAT(parts.launcher, ElementsAre("--node_rank=0", "--nproc_per_node=auto"));
  EXPECT_EQ(parts.program.front(), "--optimizer.lr=0.1");
  config::Faults faults;
  const auto keys_of = [&faults](const std::vector<std::string>& words) {
    return config::to_yaml(parse_arguments(kTraining, words, faults).overrides);
  };
  EXPECT_EQ(keys_of(parts.typed), keys_of(parts.program));
  // A new type drops the keys of the former, in either spelling.
  EXPECT_EQ(keys_of({"-a", "resnet18", "--model.dropout=0.2", "--model=resnet50"}),
            keys_of({"--model=resnet18", "--model.dropout=0.2", "--model=resnet50"}));
}

TEST(ImagenetOptionsTest, WorldSizeCountsProcessesWhereNodesHaveOne) {
  EXPECT_THAT(translated({"world_size=2", "rank=1"}),
              ElementsAre("--nnodes=2", "--node_rank=1", "--nproc_per_node=1"));
  EXPECT_THAT(translated({"--world-size", "4", "--rank=3"}),
              ElementsAre("--nnodes=4", "--node_rank=3", "--nproc_per_node=1"));
  EXPECT_THAT(translated({"--world-size", "4", "--nproc_per_node", "2"}),
              ElementsAre("--nnodes=4", "--nproc_per_node", "2"));
}

TEST(ImagenetOptionsTest, ForSeveralProcessesAreIgnoredByOne) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"--rank", "0"},
        {"--rank=5"},
        {"--dist-url", "tcp://10.0.0.1:23456"},
        {"--world-size=1", "--rank", "0", "--dist-url=tcp://10.0.0.1:23456"},
        {"--rank", "-1", "--world-size", "-1"}}) {
    EXPECT_THAT(translated(words), ::testing::IsEmpty()) << words.front();
  }
  // The example's defaults.
  EXPECT_THAT(translated({"--world-size=-1", "--multiprocessing-distributed", "--rank=-1"}),
              ElementsAre("--nproc_per_node=auto"));
  EXPECT_THAT(translated({"--nnodes=2", "--rank=1"}), ElementsAre("--nnodes=2", "--node_rank=1"));
}

TEST(ImagenetOptionsTest, ForSeveralProcessesAreNamedAsTyped) {
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--world-size", "x"}, "--world-size: expected a number of at least 1, got 'x'"},
           {{"--world_size=0"}, "--world_size: expected a number of at least 1, got '0'"},
           {{"--rank=-2"}, "--rank: expected a number of at least 0, got '-2'"}}) {
    EXPECT_EQ(test::message_of<base::UserError>([&] { translated(words); }), message);
  }
}

TEST(ImagenetOptionsTest, DummyDataWinOverAFolder) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder / "train");
  const std::string data = folder.path().string();
  EXPECT_THAT(translated({data, "--dummy"}), ElementsAre("--data.type=synthetic"));
  EXPECT_THAT(translated({"--dummy", data, "-b=4"}),
              ElementsAre("--data.type=synthetic", "--batch_size=4"));
}

TEST(ImagenetOptionsTest, AFolderOfDataThatIsNoneIsNamed) {
  const test::TempFolder folder;
  const std::string data = folder.path().string();
  const auto faults_of = [](const std::vector<std::string>& words) {
    config::Faults faults;
    parse_arguments(kTraining, words, faults);
    return faults.messages();
  };
  for (const std::vector<std::string>& before : std::vector<std::vector<std::string>>{
           {"--config", "x.yaml"},
           {"--config=x.yaml", "-a", "resnet18"},
           {"--config=x.yaml", "--multiprocessing-distributed"}}) {
    std::vector<std::string> words = before;
    words.push_back("no/where");
    EXPECT_THAT(faults_of(words),
                ElementsAre("unexpected argument 'no/where': there is no folder of this name; "
                            "options begin with '--', and keys are set by KEY=VALUE"));
    words.back() = data;
    EXPECT_THAT(faults_of(words),
                ElementsAre("unexpected argument '" + data +
                            "': this folder has no folder 'train' of images; options begin with "
                            "'--', and keys are set by KEY=VALUE"));
  }
  EXPECT_THAT(faults_of({"--config=x.yaml", "epochs"}),
              ElementsAre("unexpected argument 'epochs'; did you mean '--epochs'?"));
  EXPECT_THAT(faults_of({"--config=x.yaml", "--run_dir", "nowhere"}), ::testing::IsEmpty());
}

TEST(ImagenetOptionsTest, ChooseTheDevice) {
  EXPECT_THAT(translated({"--no-accel"}), ElementsAre("--device=cpu"));
  EXPECT_THAT(translated({"--gpu", "3"}), ElementsAre("--device=cuda:3"));
}

TEST(ImagenetOptionsTest, LeaveOtherWordsAlone) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder.path() / "train");
  const std::vector<std::string> words = {"--config",  "x.yaml",      "optimizer.lr=-1",
                                          "--run_dir", folder.path(), "--overwrite",
                                          "--seed",    "-1"};
  EXPECT_EQ(translated(words), words);
}

TEST(ImagenetOptionsTest, SayWhatHasNoCounterpart) {
  const auto error = [](const std::vector<std::string>& words) {
    return test::message_of<base::UserError>([&] { translated(words); });
  };
  const test::TempFolder folder;
  std::filesystem::create_directory(folder / "train");
  for (const std::vector<std::string>& words : {std::vector<std::string>{"--pretrained"},
                                                {"--pretrained", "-j", "4"},
                                                {"--pretrained", folder.path()}}) {
    EXPECT_THAT(error(words),
                HasSubstr("the option '--pretrained' needs a value: a file of weights"));
  }
  EXPECT_THAT(error({"--dist-url", "nowhere"}),
              HasSubstr("--dist-url=nowhere: expected tcp://HOST:PORT, with the number of a free "
                        "port, file://PATH or env://"));
  for (const std::string port : {"FREEPORT", "", "70000", "-1"}) {
    EXPECT_THAT(error({"--dist-url", "tcp://10.0.0.1:" + port}),
                HasSubstr("--dist-url=tcp://10.0.0.1:" + port + ": expected tcp://HOST:PORT"));
  }
  EXPECT_THAT(error({"-a"}), HasSubstr("the option '-a' needs a value"));
  for (const std::string typed : {"--evaluate=true", "-e1", "--dummy=", "--no-accel=0"}) {
    EXPECT_EQ(error({typed}), typed + ": this option takes no value; write only the option");
  }
}

TEST(ImagenetOptionsTest, OfAnEvaluation) {
  EXPECT_TRUE(is_evaluation({"-a", "resnet18", "-e"}));
  EXPECT_FALSE(is_evaluation({"-a", "resnet18", "--evaluate=x"}));
  EXPECT_THAT(translated({"--pretrained", "w.pth"}), ElementsAre("--init=w.pth"));
  EXPECT_THAT(translated({"--evaluate", "--pretrained=w.pth"}),
              ElementsAre("--split=val", "--resume=w.pth"));
}

TEST(ImagenetOptionsTest, MeetAtAFileOnOneNode) {
  EXPECT_THAT(translated({"--dist-url", "file:///tmp/x", "--world-size=1", "--rank=0",
                          "--multiprocessing-distributed"}),
              ElementsAre("--nnodes=1", "--node_rank=0", "--nproc_per_node=auto"));
  EXPECT_THAT(translated({"--dist-url=file:///tmp/x"}), ::testing::IsEmpty());
  EXPECT_EQ(
      test::message_of<base::UserError>([] {
        split_launch_options({"--dist-url", "file:///tmp/x", "--world-size", "2", "--rank=0"});
      }),
      "--dist-url=file:///tmp/x: a file is a meeting point on one node only; give "
      "tcp://HOST:PORT of node 0");
}

TEST(ImagenetOptionsTest, MisspeltAreNamedByTheNearest) {
  for (const auto& [typed, meant] : std::vector<std::pair<std::string, std::string>>{
           {"--multiprocess-distributed", "--multiprocessing_distributed"},
           {"--print-frequ", "--print_freq"},
           {"--evaluat", "--evaluate"},
           {"--dist-backen", "--dist_backend"}}) {
    config::Faults faults;
    parse_arguments("train", {typed}, faults);
    EXPECT_THAT(faults.messages(),
                ElementsAre(HasSubstr(fmt::format("did you mean '{}'?", meant))));
  }
}

TEST(ImagenetOptionsTest, FindTheFolderOfTheData) {
  const test::TempFolder folder;
  const std::string data = folder.path().string();
  std::filesystem::create_directory(folder.path() / "train");
  const std::vector<std::string> keys = {
      "--data.type=image_folder", "--data.train=" + data + "/train", "--data.val=" + data + "/val"};
  EXPECT_EQ(translated({data}), keys);
  EXPECT_THAT(translated({"--multiprocessing-distributed", data}),
              ElementsAre("--nproc_per_node=auto", keys[0], keys[1], keys[2]));
  EXPECT_THAT(translated({"predict", data}), ElementsAre("predict", data));
  // The command, even if there is a folder with this name.
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(data);
  std::filesystem::create_directory("eval");
  EXPECT_THAT(translated({"eval"}), ElementsAre("eval"));
  std::filesystem::current_path(here);
}

TEST(ArgumentsTest, ACheckpointInARunsFolderIsThatRunWithTheCheckpoint) {
  const test::TempFolder folder;
  for (const char* name : {"run", "other"}) std::filesystem::create_directory(folder / name);
  for (const char* file : {"run/last.pt", "run/config.yaml", "run/x.yaml", "other/x.pt"}) {
    folder.write(file, "");
  }
  using Settings = std::pair<std::string, std::string>;
  const auto settings = [&](const std::string& word) {
    config::Faults faults;
    const auto line = parse_arguments("eval", {folder / word, "--split=val"}, faults);
    const config::Value* const resume = line.overrides.find("resume");
    return Settings(line.value("config").value_or(""), resume == nullptr ? "" : resume->scalar);
  };
  EXPECT_EQ(settings("run/last.pt"), Settings(folder / "run/config.yaml", folder / "run/last.pt"));
  EXPECT_EQ(settings("run/x.yaml"), Settings(folder / "run/x.yaml", ""));
  EXPECT_EQ(settings("run"), Settings(folder / "run", ""));
  EXPECT_EQ(settings("other/x.pt"), Settings("", ""));
  EXPECT_EQ(settings("run/x.pt"), Settings("", "")) << "there is no such file";
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(folder / "run");
  config::Faults faults;
  const auto line = parse_arguments("eval", {"--resume=last.pt"}, faults);
  std::filesystem::current_path(here);
  EXPECT_FALSE(line.has("config"));
  EXPECT_EQ(line.overrides.find("resume")->scalar, "last.pt");
}

TEST(ArgumentsTest, ACheckpointOfARunWithoutItsConfigurationAsksForOneAsItsFolderDoes) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder / "run");
  folder.write("run/last.pt", "");
  const auto said = [](const std::string& word) {
    return test::message_of<base::UserError>([&] {
      config::Faults faults;
      resolve_config(parse_arguments("eval", {word}, faults), faults);
    });
  };
  EXPECT_THAT(said(folder / "run/last.pt"),
              AllOf(HasSubstr("run/config.yaml: No such file; the run's own configuration is"),
                    HasSubstr("--config FILE --run_dir")));
  EXPECT_EQ(said(folder / "run/last.pt"), said(folder / "run"));
}

TEST(ArgumentsTest, AnEmptyValueOfAnOptionOfTheExampleIsNamedAsTyped) {
  config::Faults faults;
  parse_arguments(kTraining, {"-b", "", "-j=", "max_time="}, faults);
  const std::string none = ", or write null for none";
  EXPECT_THAT(faults.messages(),
              ElementsAre("-b: the value is empty; give it one (integer or null)" + none,
                          "-j: the value is empty; give it one (integer or auto)",
                          "max_time: the value is empty; give it one (duration or null)" + none));
}

TEST(RanksOfJobTest, AreTheLaunchers) {
  ::unsetenv("WORLD_SIZE");
  EXPECT_EQ(ranks_of_job(), std::nullopt);
  ::setenv("WORLD_SIZE", "3", 1);
  EXPECT_EQ(ranks_of_job(), 3);
  ::setenv("WORLD_SIZE", "0", 1);
  EXPECT_THROW(ranks_of_job(), base::UserError);
  ::unsetenv("WORLD_SIZE");
}

std::string launch_error(const std::vector<std::string>& words) {
  return test::message_of<base::UserError>([&] { launch_if_asked(words); });
}

TEST(LaunchIfAskedTest, NamesAnOptionOfTheLauncherWithoutIt) {
  EXPECT_EQ(launch_error({"--config=x.yaml", "--node-rank", "1", "--epochs=3"}),
            "--node_rank is for the launcher: give --nproc_per_node=N as well, or start this "
            "program with syncbn-launch");
  EXPECT_NO_THROW(launch_if_asked({"--config=x.yaml", "--epochs=3"}));
}

TEST(LaunchIfAskedTest, AsksForTheValueOfAnOption) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"--epochs=3", "--nproc_per_node"},
        {"--nproc_per_node", "--epochs=3"}}) {
    EXPECT_EQ(launch_error(words), "the option '--nproc_per_node' needs a value");
  }
}

TEST(LaunchIfAskedTest, SaysThatTheLauncherIsMissing) {
  ::setenv("PATH", "/nowhere", 1);
  EXPECT_THAT(
      launch_error({"--nproc_per_node=2"}),
      ::testing::StartsWith("--nproc_per_node: cannot execute syncbn-launch: No such file"));
}

}  // namespace
}  // namespace syncbn::train
