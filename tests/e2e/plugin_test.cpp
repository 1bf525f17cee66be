#include <elf.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/data/image.h>
#include <syncbn/train/checkpoint.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "e2e/log_lines.h"
#include "e2e/png.h"
#include "e2e/quiet_exits.h"
#include "e2e/train_program.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

std::string plugin(const std::string& name) {
  return SYNCBN_TEST_BIN_DIR "/plugins/lib" + name + ".so";
}

/// Runs `train` on the digits' configuration with `text` merged over it.
class PluginTest : public ::testing::Test {
 protected:
  Words arguments(const std::string& text) {
    base::write_file_atomically(folder_ / "own.yaml",
                                "base: " + shipped_config("digits.yaml") + "\n" + text);
    return {"--config", folder_ / "own.yaml", "--run_dir", folder_ / "run", "--max_steps=2"};
  }

  ProgramResult train_with(const std::string& text) { return run_train(arguments(text)); }

  TempFolder folder_;
};

TEST_F(PluginTest, TrainsWithAScheduleOfAPlugin) {
  const auto result = train_with("plugins: [" + plugin("staircase") +
                                 "]\nschedule: {type: staircase, steps: 1}\nlog_interval: 1\n");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  // The second step has half the learning rate of digits.yaml.
  EXPECT_THAT(base::read_file(folder_ / "run/log.jsonl"), HasSubstr("\"lr\":0.05"));
  EXPECT_THAT(base::read_file(folder_ / "run/config.yaml"), HasSubstr("type: staircase"));
  const auto evaluated = run_train({"eval", folder_ / "run"});
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.err;
}

TEST_F(PluginTest, TrainsOnImageFilesOfAPluginAndPredictsOthers) {
  for (const int shade : {0, 1, 2, 3}) {  // two red images, two green ones
    std::string pixel(3, '\0');
    pixel[shade < 2 ? 0 : 1] = static_cast<char>(200 + 10 * shade);
    std::string pixels;
    for (int i = 0; i < 64; ++i) pixels += pixel;
    folder_.write(fmt::format("{}.png", shade), png(8, 8, pixels));
  }
  folder_.write("list.csv", "0.png,0\n1.png,0\n2.png,1\n3.png,1\n");
  const std::string resize = "[{type: resize, height: 8, width: 8}]";
  folder_.write("own.yaml",
                fmt::format("plugins: [{0}]\nbatch_size: 2\nepochs: 20\nseed: 1\n"
                            "model: {{type: digits, width: 4}}\noptimizer: {{type: sgd, lr: 0.1}}\n"
                            "data: {{type: listed, train: list.csv, test: list.csv, "
                            "transforms: {1}, test_transforms: {1}}}\n",
                            plugin("listed"), resize));
  const auto trained = run_train({"--config=own.yaml", "--run_dir=run"}, {}, folder_.path());
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_EQ(result_of(folder_ / "run")["test_accuracy"], 1.0);
  const auto predicted = run_train(
      {"predict", "3.png", "--config=run/config.yaml", "--resume=run/last.pt"}, {}, folder_.path());
  EXPECT_EQ(predicted.exit_code, 0) << predicted.err;
  EXPECT_THAT(predicted.out, HasSubstr("3.png,1,"));
  folder_.write("list.csv", "0.png\n");
  EXPECT_THAT(run_train({"--config=own.yaml"}, {}, folder_.path()).err,
              HasSubstr("list.csv: expected image,class, got '0.png'"));
}

TEST_F(PluginTest, LayersOfLibtorchFollowSyncBatchnorm) {
  const auto loss = [&](const Words& more) {
    const Words args =
        arguments("plugins: [" + plugin("staircase") +
                  "]\noverwrite: true\nmodel: plain_norm\nsampler: distributed\nlog_interval: 1\n");
    const auto result = run_train(args + more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return log_of(folder_ / "run", "step").back()["loss"].get<double>();
  };
  const double whole = loss({"--batch_size=8"});
  EXPECT_NEAR(loss({"--batch_size=4", "--nproc_per_node=2"}), whole, 1e-4);
  EXPECT_GT(
      std::abs(loss({"--batch_size=4", "--nproc_per_node=2", "--sync_batchnorm=false"}) - whole),
      1e-3);
}

TEST_F(PluginTest, ResolvesItsPathBeforeItsNames) {
  const auto copy = folder_ / "libcopy.so";
  std::filesystem::copy_file(plugin("staircase"), copy);
  const auto result = train_with("plugins: [\"${here}/libcopy.so\"]\nschedule: staircase\n");
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST_F(PluginTest, ReadsItsOptionsUnderTheSameRules) {
  const auto args = [&](const std::string& text) {
    return "plugins: [" + plugin("staircase") + "]\nschedule: {type: staircase, " + text + "}\n";
  };
  EXPECT_THAT(train_with(args("steps: 0")).err,
              HasSubstr("schedule.steps: must be at least 1, got 0"));
  EXPECT_THAT(train_with(args("step: 1")).err, HasSubstr("did you mean 'schedule.steps'?"));
  EXPECT_THAT(train_with("schedule: staircase\n").err, HasSubstr("unknown type 'staircase'"));
  const auto overridden = run_train({"--config", shipped_config("digits.yaml"), "--plugins",
                                     "[" + plugin("staircase") + "]", "--schedule=staircase",
                                     "--schedule.steps=7", "--print_config"});
  EXPECT_EQ(overridden.exit_code, 0) << overridden.err;
  EXPECT_THAT(overridden.out, HasSubstr("steps: 7"));
}

TEST_F(PluginTest, ListsItsNamesWithItsOptions) {
  const auto result = run_train({"--list", "schedules", "--plugins=[" + plugin("staircase") + "]"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              ContainsRegex("falls to a half, a third, and so on[ \n]+\\[libstaircase.so\\]"));
  EXPECT_THAT(result.out, ContainsRegex("steps integer +steps of training on each stair"));
  EXPECT_THAT(run_train({"--list", "schedules"}).out, Not(HasSubstr("staircase")));
  for (const char* page : {"--print_schema", "--print_reference"}) {
    EXPECT_THAT(run_train({page, "--plugins=[" + plugin("staircase") + "]"}).out,
                HasSubstr("steps of training on each stair"));
  }
  const auto all = run_train({"--list", "--plugins=[" + plugin("staircase") + "]"});
  EXPECT_EQ(all.exit_code, 0) << all.err;
  EXPECT_THAT(all.out, ContainsRegex("\nschedules   constant,.* staircase"));
  EXPECT_THAT(run_train({"--list", "shedules"}).err, HasSubstr("did you mean 'schedules'?"));
}

TEST_F(PluginTest, WhatIsNoPluginForThisProgramIsRefused) {
  for (const auto& [name, message] : std::map<std::string, std::string>{
           {"nowhere", "No such file"},
           {"no_entry", "is no plug-in: it has no SYNCBN_PLUGIN"},
           {"other_abi", "was built for syncbn 0.0.1, libtorch 2.3, and this program has"},
           {"other_headers",
            "was built for headers of syncbn with digest 0123456789ab, and this program has "
            "headers of syncbn with digest "},
           {"throws", "cannot load libthrows.so: its licence has expired"},
           {"twice", "the schedule 'cosine' is registered already, by this program; choose"},
           {"undefined", "undefined symbol"}}) {
    SCOPED_TRACE(name);
    const auto result = train_with("plugins: [" + plugin(name) + "]\n");
    expect_mistake(result, message);
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("own.yaml:2:11: plugins: "), HasSubstr("lib" + name + ".so")));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  }
}

TEST_F(PluginTest, IsRefusedIfItIsNoFile) {
  const std::string fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, std::string("/dev/zero")}) {
    expect_mistake(train_with("plugins: [" + path + "]\n"), "plugins: " + path + " is no file");
  }
  expect_mistake(train_with("plugins: ['']\n"), "plugins: a name is empty");
}

TEST_F(PluginTest, IsInAList) {
  const auto result = train_with("plugins: " + plugin("staircase") + "\nschedule: staircase\n");
  expect_mistake(result,
                 "own.yaml:2:10: plugins: expected a list, as [" + plugin("staircase") + "]\n");
  EXPECT_THAT(result.err, Not(HasSubstr("unknown type")));
}

TEST_F(PluginTest, IsRefusedIfItIsCutOff) {
  const std::string whole = base::read_file(plugin("staircase"));
  const std::string cut = folder_ / "libcut.so";
  // An interrupted copy may already have its full size, with zeros at the end. `sstrip` removes the
  // section headers.
  std::string zeros = whole;
  zeros.replace(whole.size() / 2, whole.npos, whole.size() - whole.size() / 2, '\0');
  std::string stripped = whole;
  Elf64_Ehdr header{};
  std::memcpy(&header, whole.data(), sizeof header);
  header.e_shoff = header.e_shnum = header.e_shstrndx = 0;
  stripped.replace(0, sizeof header, reinterpret_cast<const char*>(&header), sizeof header);
  const auto train_with_file = [&](const std::string& bytes) {
    base::write_file_atomically(cut, bytes);
    return train_with("schedule: staircase\nplugins: [" + cut + "]\n");
  };
  for (const std::string& damaged :
       {whole.substr(0, whole.size() - 100), whole.substr(0, whole.size() / 2), whole.substr(0, 30),
        zeros, stripped.substr(0, whole.size() / 4)}) {
    expect_mistake(train_with_file(damaged),
                   "plugins: " + cut + " is cut off or damaged; copy or build it again");
  }
  EXPECT_EQ(train_with_file(stripped).exit_code, 0);
}

TEST_F(PluginTest, MistakesOfItsNetworksNameThemBeforeTheFirstStep) {
  for (const auto& [network, what] : std::map<std::string, std::string>{
           {"throwing", "width is bad"},
           {"narrow", "mat1 and mat2 shapes cannot be multiplied (1x64 and 9x10)"},
           {"generous",
            "forward() makes [1, 11] of one sample, and with the 10 classes of the data it has to "
            "make [1, 10]"}}) {
    expect_mistake(train_with("plugins: [" + plugin("networks") + "]\nmodel: " + network + "\n"),
                   "train: error: model " + network + " of libnetworks.so: " + what);
  }
}

TEST_F(PluginTest, ACheckNamesMistakesOfItsNetworkAndSchedule) {
  const auto check = [&](const std::string& text, const Words& more = {}) {
    return run_train(Words{"check"} + arguments("plugins: [" + plugin("networks") + "]\n" + text) +
                     more);
  };
  expect_mistake(check("model: narrow\n", {"--device=cpu"}),
                 "model narrow of libnetworks.so: mat1 and mat2 shapes cannot be multiplied");
  expect_mistake(check("schedule: unmade\n"), "schedule unmade of libnetworks.so: no curve");
  // A network for GPUs may have no operators for the CPU, which a check uses.
  const auto on_gpu = check("model: narrow\n", {"--device=cuda"});
  EXPECT_EQ(on_gpu.exit_code, 0) << on_gpu.err;
  expect_mistake(check("model: narrow\n", {"--device=cuda", "--init=none.pth"}),
                 "cannot read none.pth");
}

TEST_F(PluginTest, MistakesOfItsDataAndMetricsNameThemBeforeTheFirstStep) {
  const std::string networks = "plugins: [" + plugin("networks") + "]\n";
  expect_mistake(train_with(networks + "data: pairs\n"),
                 "data pairs of libnetworks.so: get_batch() makes [1, 2] of one sample, and with "
                 "its sample_shape() it has to make [1, 3]");
  expect_mistake(train_with(networks + "metrics: [nameless]\n"), "metrics: one has no name");
}

TEST_F(PluginTest, MistakesOfItsNetworksInAStepNameThemTheStepAndTheShapes) {
  const std::string network = "model flawed of libnetworks.so";
  const std::string outputs = " of " + network + " and targets Long [8]: ";
  const std::string task = "task classification with loss cross_entropy, given outputs ";
  for (const auto& [flaw, what] : std::map<std::string, std::string>{
           {"throws", network + ", given Float [8, 1, 8, 8]: no more licences"},
           {"number", network + ", given Float [8, 1, 8, 8]: what it threw is not a std::exc"},
           {"undefined", network + ", given Float [8, 1, 8, 8]: it made an undefined tensor"},
           {"detached", "backward pass of " + network +
                            ", given Float [8, 1, 8, 8]: the loss does not depend on a parameter"},
           {"integers", task + "Long [8, 10]" + outputs},
           {"batch", task + "Float [7, 10]" + outputs}}) {
    const auto result = train_with("plugins: [" + plugin("networks") +
                                   "]\nmodel: {type: flawed, flaw: " + flaw + "}\n");
    EXPECT_EQ(result.exit_code, base::kExitInternal) << result.err;
    EXPECT_THAT(result.err, HasSubstr("train: uncaught exception: step 1: " + what));
    EXPECT_EQ(count(result.err, "exception: "), 1) << result.err;
    EXPECT_THAT(base::read_file(folder_ / "run/log.jsonl"), HasSubstr("an error: step 1: "));
  }
}

TEST_F(PluginTest, MistakesOfItsOtherPartsNameThemAndTheStep) {
  const std::string data = "batch_size: 8\ndata: {type: flawed, flaw: ";
  const std::string plugins = "overwrite: true\nplugins: [" + plugin("networks") + "]\n";
  for (const auto& [text, what] : std::map<std::string, std::string>{
           {"task: {type: classification, loss: flawed}",
            "step 1: task classification with loss flawed of libnetworks.so, given outputs Float "
            "[8, 10] of model digits and targets Long [8]: cannot compare"},
           {"metrics: [{type: flawed, flaw: throws}]",
            "evaluation after step 2: metric flawed of libnetworks.so: cannot count"},
           {"model: {type: flawed, flaw: evaluation}",
            "evaluation after step 2: model flawed of libnetworks.so, given Float ["},
           {data + "throws}", "step 1: data flawed of libnetworks.so: no sample 5"}}) {
    const auto result = train_with(plugins + text + "\n");
    EXPECT_EQ(result.exit_code, base::kExitInternal) << result.err;
    EXPECT_THAT(result.err, HasSubstr("train: uncaught exception: " + what));
  }
  for (const auto& [text, what] : std::map<std::string, std::string>{
           {"metrics: [{type: flawed, flaw: floats}]",
            "metric flawed of libnetworks.so counts float of shape [1], and has to count "
            "int64 of shape [1]"},
           {"metrics: [{type: flawed, flaw: space}]", "metrics: the name 'off by' has a space"},
           {data + "size}",
            "data flawed of libnetworks.so: size() of the train split is -4; it has to be 0 or"}}) {
    expect_mistake(train_with(plugins + text + "\n"), "train: error: " + what);
  }
}

TEST_F(PluginTest, AMetricThatThrowsDoesNotLoseTheEpochThatWasTrained) {
  auto args = arguments("plugins: [" + plugin("networks") +
                        "]\nmetrics: [{type: flawed, flaw: throws}]\nepochs: 2\n"
                        "sampler: distributed\ncheckpoint: {every: 10ep}\n");
  std::erase(args, "--max_steps=2");
  auto ranks = start_ranks(2, args);
  for (const auto& result : wait_for(ranks)) {
    EXPECT_EQ(result.exit_code, base::kExitInternal) << result.err;
    EXPECT_THAT(result.err, HasSubstr("metric flawed of libnetworks.so: cannot count"));
  }
  EXPECT_EQ(checkpoint_of(folder_ / "run/last.pt").sampler.epoch, 1);
}

TEST_F(PluginTest, TrainsWithATransformLossOptimizerSamplerAndTaskOfAPlugin) {
  const std::filesystem::path source =
      std::filesystem::path(SYNCBN_SOURCE_DIR) / "tests/data/images";
  for (const std::string split : {"train", "test"}) {
    for (const std::string label : {"a", "b"}) {
      const std::filesystem::path target = folder_ / split / label;
      std::filesystem::create_directories(target);
      const std::string image = label == "a" ? "png_grey8.png" : "jpeg_444.jpg";
      for (const char* name : {"1", "2", "3"}) {
        std::filesystem::copy_file(source / image, target / (name + image));
      }
    }
  }
  const auto train_here = [&](const std::string& run, int epochs, const std::string& transform,
                              const std::string& more) {
    const std::string steps = "[{type: resize, size: 8}, {type: center_crop, size: 8}";
    base::write_file_atomically(
        folder_ / "own.yaml",
        fmt::format("plugins: [{0}]\nepochs: {1}\nbatch_size: 3\nsampler: backwards\n{2}\n"
                    "model: {{type: digits, width: 4}}\n"
                    "data: {{type: image_folder, train: train, test: test, cache_dir: cache,\n"
                    "  transforms: {3}{4}], test_transforms: {3}]}}\n",
                    plugin("staircase"), epochs, more, steps, transform));
    const auto result =
        run_train({"--config", "own.yaml", "--run_dir", run, "--resume=auto"}, {}, folder_.path());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return checkpoint_of(folder_ / (run + "/last.pt"));
  };
  const std::string own = "task: {type: classification, loss: shifted}\noptimizer: sign";
  const auto saved = train_here("own", 2, ", negative", own);
  EXPECT_EQ(saved.sampler.order, "backwards");
  EXPECT_THAT(saved.epoch_line, ContainsRegex("\"train_loss\":10[0-9]\\."));
  const auto steps_of = [](const train::Checkpoint& checkpoint) {
    return checkpoint.optimizer.begin()->second.at("steps").item<int64_t>();
  };
  EXPECT_EQ(steps_of(saved), 4);
  EXPECT_EQ(steps_of(train_here("own", 3, ", negative", own)), 6) << "resumed";

  const auto of_task = train_here("corners", 1, "", "task: corners\noptimizer: sign");
  EXPECT_THAT(of_task.epoch_line, HasSubstr("\"test_hits\":"));
  const std::string picture = "pictures/first_batch-000000000000.png";
  const data::Image negative = data::load_image(folder_ / ("own/" + picture));
  const data::Image plain = data::load_image(folder_ / ("corners/" + picture));
  ASSERT_EQ(negative.pixels.size(), plain.pixels.size());
  for (int64_t i = 0; i < 8 * plain.channels; ++i) {  // the first eight pixels of the first image
    const auto at = static_cast<size_t>(i);
    EXPECT_NEAR(negative.pixels[at], 255 - plain.pixels[at], 2) << i;
  }
}

TEST_F(PluginTest, IsReportedByOneRank) {
  shorten_quiet_exits();
  auto ranks = start_ranks(3, arguments("plugins: [" + plugin("throws") + "]\n"));
  int messages = 0;
  for (const auto& result : wait_for(ranks)) {
    EXPECT_EQ(result.exit_code, base::kExitUsage);
    messages += count(result.err, "its licence has expired");
  }
  EXPECT_EQ(messages, 1);
}

TEST_F(PluginTest, OfAnotherContentOnARankIsNamed) {
  shorten_quiet_exits();
  const int port = free_port();
  const std::string other = folder_ / "libstaircase.so";
  base::write_file_atomically(other, base::read_file(plugin("staircase")) + "\n");
  const auto start = [&](int rank, const std::string& file) {
    return start_train(arguments("schedule: staircase\n") + Words{"--plugins=[" + file + "]"},
                       rank_env(rank, 2, port));
  };
  const auto first = start(0, plugin("staircase"));
  const auto second = start(1, other);
  const auto result = first->wait();
  EXPECT_EQ(result.exit_code, base::kExitUsage);
  EXPECT_THAT(
      result.err,
      ContainsRegex("plug-ins: \"libstaircase.so [0-9a-f]+\" on rank 0 .+, \"libstaircase.so "
                    "[0-9a-f]+\" on rank 1 "));
  EXPECT_EQ(second->wait().err, "");
}

}  // namespace
}  // namespace syncbn::test
