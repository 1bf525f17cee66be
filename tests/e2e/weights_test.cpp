// init, freeze, and the evaluation of weights that Python saved.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/checkpoint.h>

#include "e2e/train_program.h"
#include "support/multiproc.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class WeightsProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto first = run_train(args("first", {}));
    ASSERT_EQ(first.exit_code, 0) << first.err;
  }

  Words args(const std::string& run, const Words& more) const {
    return digits(path_of(run), {"--epochs=1", "--data.test_fraction=0.6", "--sampler=distributed",
                                 "--schedule=constant"}) +
           more;
  }

  models::StateDict weights(const std::string& file) const {
    return models::read_state_dict(folder_ / file);
  }

  std::string path_of(const std::string& file) const { return folder_ / file; }

  double accuracy(const std::string& run) const {
    return result_of(folder_ / run)["test_accuracy"];
  }

  const TempFolder folder_;
};
using PythonWeightsProgramTest = WeightsProgramTest;

TEST_F(WeightsProgramTest, ARunBeginsWithTheNetworkOfAnotherOnAllRanks) {
  // With a learning rate too small to change anything.
  run_ranks_of_train(2, args("again", {"--init=" + path_of("first"), "--optimizer.lr=1e-30",
                                       "--optimizer.weight_decay=0"}));
  models::StateDict before = weights("first/best.pt");
  for (const auto& item : weights("again/last.pt")) {
    const bool is_statistic = item.key().find("running") != std::string::npos ||
                              item.key().ends_with("num_batches_tracked");
    if (is_statistic) continue;
    EXPECT_TRUE(at::equal(item.value(), before[item.key()])) << item.key();
  }
  const auto skipping =
      run_train(args("other", {"--init=" + path_of("first/best.pt"), "--init_skip=[fc]", "--seed=5",
                               "--schedule.warmup=2"}));
  EXPECT_EQ(skipping.exit_code, 0) << skipping.err;
  EXPECT_THAT(skipping.err, HasSubstr("first/best.pt; random: fc.weight, fc.bias\n"));
  EXPECT_THAT(skipping.err, ContainsRegex("schedule.warmup takes [0-9]+ steps and the run [0-9]+: "
                                          "the learning rate rises until the end"));
}

TEST_F(PythonWeightsProgramTest, PythonsFilesAreEvaluatedAndTrainedFurther) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  constexpr const char* kSave = R"(
import sys, torch
model = torch.load(sys.argv[1] + "/first/best.pt", weights_only=True)["model"]
state = {"module." + k: v for k, v in model.items() if not k.endswith("num_batches_tracked")}
torch.save({"state_dict": state, "epoch": 3}, sys.argv[1] + "/python.pth")
)";
  const auto saved = run_program({python(), "-c", kSave, folder_.path().string()});
  ASSERT_EQ(saved.exit_code, 0) << saved.err;
  const std::string file = path_of("python.pth");
  const auto evaluate = [&](const std::string& weights) {
    const auto result = run_train(Words{"eval"} + digits(path_of("none"), {"--resume=" + weights}));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    auto json = nlohmann::json::parse(result.out);
    json.erase("checkpoint");
    return json;
  };
  EXPECT_EQ(evaluate(file), evaluate(path_of("first/best.pt")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "none"));
  const auto on_ranks = launch_train(2, {"eval", "--config=" + shipped_config("digits.yaml"),
                                         "--resume=" + file, "--model.width=8"});
  expect_mistake(on_ranks, "cannot load " + file);
  EXPECT_THAT(on_ranks.err, HasSubstr("of another shape: conv1.weight (["));
  EXPECT_THAT(run_train(args("narrow", {"--init=" + file, "--model.width=8"})).err,
              ContainsRegex("of another shape: conv1.weight [^\n]*\n"
                            "  to take the tensors that fit, set init_skip=\\[conv1,"));
  const auto further = run_train(args("further", {"--init=" + file}));
  EXPECT_EQ(further.exit_code, 0) << further.err;
  EXPECT_GT(accuracy("further"), accuracy("first"));
  expect_mistake(run_train(args("resumed", {"--resume=" + file})), "init=" + file);
}

TEST_F(WeightsProgramTest, WhatIsFrozenStaysAsItWas) {
  const Words frozen = {"--init=" + path_of("first"), "--freeze=[conv1,bn*]",
                        "--freeze_statistics=true"};
  run_ranks_of_train(2, args("frozen", frozen));
  models::StateDict before = weights("first/best.pt");
  for (const auto& item : weights("frozen/last.pt")) {
    const bool is_frozen = item.key().starts_with("conv1") || item.key().starts_with("bn");
    EXPECT_EQ(at::equal(item.value(), before[item.key()]), is_frozen) << item.key();
  }
  ASSERT_EQ(run_train(args("moving", {frozen[0], frozen[1]})).exit_code, 0);
  models::StateDict moving = weights("moving/last.pt");
  EXPECT_TRUE(at::equal(moving["bn1.weight"], before["bn1.weight"]));
  EXPECT_FALSE(at::equal(moving["bn1.running_mean"], before["bn1.running_mean"]));
}

TEST_F(WeightsProgramTest, ARunResumesWithMoreOrFewerFrozenParameters) {
  const auto resume = [&](const std::string& epochs, const std::string& frozen) {
    const auto run = run_train(args(
        "run", {"--resume=auto", "--optimizer=adamw", "--epochs=" + epochs, "--freeze=" + frozen}));
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return weights("run/last.pt");
  };
  models::StateDict first = resume("1", "[]");
  models::StateDict second = resume("2", "[conv1]");
  models::StateDict third = resume("3", "[conv2]");
  EXPECT_TRUE(at::equal(first["conv1.weight"], second["conv1.weight"]));
  EXPECT_FALSE(at::equal(first["conv2.weight"], second["conv2.weight"]));
  EXPECT_FALSE(at::equal(second["conv1.weight"], third["conv1.weight"]));
  EXPECT_TRUE(at::equal(second["conv2.weight"], third["conv2.weight"]));
}

TEST_F(WeightsProgramTest, InitIsRankZerosAndItsAverageIsAKeyAway) {
  ASSERT_EQ(run_train(args("averaged", {"--ema.decay=0.9"})).exit_code, 0);
  const int port = free_port();
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    const Words init{"--init=" + path_of("averaged"), "--init_key=ema"};
    const Words own = args("again", {"--optimizer.lr=1e-30", "--optimizer.weight_decay=0"});
    ranks.push_back(start_train(rank == 0 ? own + init : own, rank_env(rank, 2, port)));
  }
  for (const ProgramResult& result : wait_for(ranks)) EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto average = models::read_state_dict(folder_ / "averaged/last.pt", "ema");
  EXPECT_TRUE(at::equal(weights("again/last.pt")["conv1.weight"], average["conv1.weight"]));
  EXPECT_FALSE(at::equal(weights("averaged/last.pt")["conv1.weight"], average["conv1.weight"]));
}

TEST_F(WeightsProgramTest, AllRanksBeginWithItsStatistics) {
  run_ranks_of_train(2, args("again", {"--init=" + path_of("first"), "--freeze=[conv*,bn*]",
                                       "--freeze_statistics=true", "--distribute_bn=reduce",
                                       "--ddp.broadcast_buffers=false", "--max_steps=1"}));
  models::StateDict before = weights("first/best.pt");
  models::StateDict after = weights("again/last.pt");
  for (const char* name : {"bn1.running_mean", "bn1.running_var", "bn3.running_var"}) {
    EXPECT_TRUE(at::equal(after[name], before[name])) << name;
  }
}

TEST_F(WeightsProgramTest, WhatDoesNotFitIsOneMessage) {
  const auto expect = [&](const Words& more, const std::string& message) {
    expect_mistake(launch_train(2, args("refused", more)), message);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
  };
  const std::string first = "--init=" + path_of("first");
  expect({first, "--model.width=8"}, "/best.pt: the weights do not fit the network:");
  expect({first, "--init_skip=[head]"},
         "/best.pt: no tensor in the network or the file matches 'head'");
  expect({first, "--init_into=conf1"},
         "/best.pt: the network has no part 'conf1'; did you mean 'conv1'");
  expect({first, "--init_into=fc", "--init_prefix=conv1"},
         "/best.pt: the weights below 'conv1.' do not fit the network:");
  expect({first, "--init_ignore=[fc, fd]"}, "/best.pt: no tensor in the file matches 'fd'");
  expect({"--init=missing.pth"}, "init: weights missing.pth: cannot read missing.pth");
  const std::string whole = base::read_file(path_of("first/best.pt"));
  folder_.write("cut.pt", whole.substr(0, whole.size() / 2));
  expect({"--init=" + path_of("cut.pt")}, "cut.pt");
  // The format before torch 1.6: a magic number, a version, the machine, and a pickle that calls
  // os.system.
  const std::string magic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
  const std::string call(
      "\x80\x02"
      "cposix\nsystem\nX\x0e\0\0\0touch executed\x85R.",
      38);
  const std::string no_storages = "\x80\x02].";
  folder_.write("evil.pth", magic + "\x80\x02M\xe9\x03.\x80\x02}." + call + no_storages);
  expect({"--init=" + path_of("evil.pth")},
         "it holds the Python object posix.system, which is not read (nothing was executed)");
  EXPECT_FALSE(std::filesystem::exists("executed"));
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})";
  std::string size(8, '\0');
  size[0] = static_cast<char>(header.size());
  folder_.write("overlap.safetensors", size + header + std::string(8, '\0'));
  expect({"--init=" + path_of("overlap.safetensors")}, "its tensors overlap, or leave holes");
  expect({"--freeze=[layer1]"}, "freeze: 'layer1' matches no parameter");
  expect({"--freeze=['*']"}, "freeze: all parameters are frozen; nothing is left to train");
}

}  // namespace
}  // namespace syncbn::test
