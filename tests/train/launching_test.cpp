#include "commands/launching.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>

#include <cstdlib>
#include <filesystem>

#include "commands/program_options.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ImagenetOptionsTest, BecomeKeys) {
  const test::TempFolder folder;
  const std::string data = folder.path().string();
  std::filesystem::create_directory(folder.path() / "train");
  EXPECT_THAT(translate_imagenet_options({"--config", "x.yaml", "-a", "resnet50", "-j", "4", "-b",
                                          "256", "--lr", "0.1", "--wd=1e-4", "--print-freq", "5",
                                          "--epochs", "3", data}),
              ElementsAre("--config", "x.yaml", "--model=resnet50", "--loader.num_workers=4",
                          "--batch_size=256", "--optimizer.lr=0.1", "--optimizer.weight_decay=1e-4",
                          "--log_interval=5", "--epochs", "3", "--data.type=image_folder",
                          "--data.train=" + data + "/train", "--data.val=" + data + "/val"));
  EXPECT_THAT(translate_imagenet_options({"--dist-url", "tcp://[::1]:23456", "--world-size", "2",
                                          "--rank", "1", "--multiprocessing-distributed"}),
              ElementsAre("--master_addr=[::1]", "--master_port=23456", "--nnodes=2",
                          "--node_rank=1", "--nproc_per_node=auto"));
}

TEST(ImagenetOptionsTest, MayHaveTheirValuesJoinedToALetter) {
  EXPECT_THAT(translate_imagenet_options({"-b2", "-j16", "-p=5", "-aresnet18"}),
              ElementsAre("--batch_size=2", "--loader.num_workers=16", "--log_interval=5",
                          "--model=resnet18"));
  // Misspelt names.
  const std::vector<std::string> others = {"-batch", "-accumulate=4", "-x2",     "-1",      "-exp1",
                                           "-jobs4", "-epochs10",     "-batch2", "-print10"};
  EXPECT_EQ(translate_imagenet_options(others), others);
}

TEST(ImagenetOptionsTest, MayBeWrittenAsKeys) {
  EXPECT_THAT(translate_imagenet_options({"lr=0.1", "--epochs", "wd=2", "workers=4"}),
              ElementsAre("--optimizer.lr=0.1", "--epochs", "wd=2", "--loader.num_workers=4"));
  EXPECT_THAT(translate_imagenet_options({"dummy=false", "lr"}), ElementsAre("dummy=false", "lr"));
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

TEST(ImagenetOptionsTest, WorldSizeCountsProcessesWhereNodesHaveOne) {
  EXPECT_THAT(translate_imagenet_options({"--world-size", "4", "--rank=3"}),
              ElementsAre("--nnodes=4", "--node_rank=3", "--nproc_per_node=1"));
  EXPECT_THAT(translate_imagenet_options({"--world-size", "4", "--nproc_per_node", "2"}),
              ElementsAre("--nnodes=4", "--nproc_per_node", "2"));
}

TEST(ImagenetOptionsTest, ChooseTheDevice) {
  EXPECT_THAT(translate_imagenet_options({"--no-accel"}), ElementsAre("--device=cpu"));
  EXPECT_THAT(translate_imagenet_options({"--gpu", "3"}), ElementsAre("--device=cuda:3"));
}

TEST(ImagenetOptionsTest, LeaveOtherWordsAlone) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder.path() / "train");
  const std::vector<std::string> words = {"--config",  "x.yaml",      "optimizer.lr=-1",
                                          "--run_dir", folder.path(), "--overwrite",
                                          "--seed",    "-1"};
  EXPECT_EQ(translate_imagenet_options(words), words);
}

TEST(ImagenetOptionsTest, SayWhatHasNoCounterpart) {
  const auto error = [](const std::vector<std::string>& words) {
    return test::message_of<base::UserError>([&] { translate_imagenet_options(words); });
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
  EXPECT_THAT(translate_imagenet_options({"--pretrained", "w.pth"}), ElementsAre("--init=w.pth"));
  EXPECT_THAT(translate_imagenet_options({"--evaluate", "--pretrained=w.pth"}),
              ElementsAre("--split=val", "--resume=w.pth"));
}

TEST(ImagenetOptionsTest, MeetAtAFileOnOneNode) {
  EXPECT_THAT(
      translate_imagenet_options({"--dist-url", "file:///tmp/x", "--world-size=1", "--rank=0"}),
      ElementsAre("--nnodes=1", "--node_rank=0", "--nproc_per_node=1"));
  EXPECT_THAT(translate_imagenet_options({"--dist-url=file:///tmp/x"}), ::testing::IsEmpty());
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
  EXPECT_EQ(translate_imagenet_options({data}), keys);
  EXPECT_THAT(translate_imagenet_options({"--multiprocessing-distributed", data}),
              ElementsAre("--nproc_per_node=auto", keys[0], keys[1], keys[2]));
  EXPECT_THAT(translate_imagenet_options({"predict", data}), ElementsAre("predict", data));
  // The command, even if there is a folder with this name.
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(data);
  std::filesystem::create_directory("eval");
  EXPECT_THAT(translate_imagenet_options({"eval"}), ElementsAre("eval"));
  std::filesystem::current_path(here);
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
