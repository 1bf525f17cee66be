// A generative adversarial network on the digits, the smallest images that it can generate.
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/data/image.h>

#include <filesystem>
#include <string>
#include <vector>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

class GanTest : public ::testing::Test {
 protected:
  Words args(const std::string& name, const Words& more) const {
    return digits(folder_ / name, {"--sampler=distributed", "--task={type: gan, samples: 6}",
                                   "--model={type: dcgan, latent_size: 5, generator_width: 6, "
                                   "discriminator_width: 4}",
                                   "--optimizer={type: sgd, lr: 0.05}", "--epochs=2"}) +
           more;
  }

  TempFolder folder_;
};

TEST_F(GanTest, IsTheSameOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2}) {
    run_ranks_of_train(ranks, args(std::to_string(ranks),
                                   {"--max_steps=20", fmt::format("--batch_size={}", 32 / ranks)}));
  }
  const auto one = checkpoint_of(folder_ / "1/last.pt");
  const auto two = checkpoint_of(folder_ / "2/last.pt");
  for (const auto& [name, tensor] : one.model) {
    EXPECT_TRUE(at::allclose(tensor, two.model.at(name), 1e-3, 1e-4)) << name;
  }
  const auto result = result_of(folder_ / "1");
  EXPECT_NEAR(result["test_loss"], result_of(folder_ / "2")["test_loss"], 1e-3);
  EXPECT_EQ(result["test_real_accuracy"], result_of(folder_ / "2")["test_real_accuracy"]);
}

TEST_F(GanTest, GoesOnBitForBit) {
  const Words everything = {"--accumulate=2", "--ema.decay=0.9",  "--clip.norm=1",
                            "--amp=bf16",     "--optimizer=adam", "--checkpoint.every=7step"};
  run_ranks_of_train(2, args("whole", everything));
  run_ranks_of_train(2, args("parts", everything + Words{"--max_steps=61"}));
  run_ranks_of_train(2, args("parts", everything + Words{"--resume=auto"}));
  expect_same_run(checkpoint_of(folder_ / "whole/last.pt"),
                  checkpoint_of(folder_ / "parts/last.pt"));
}

TEST_F(GanTest, ShowsWhatItGenerates) {
  const auto pictures = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "run/pictures")) {
      const std::string name = entry.path().filename();
      if (name.starts_with("first_batch-")) continue;  // real images
      names.push_back(name);
      const data::Image image = data::load_image(entry.path());
      // Six images of 8 x 8 pixels, three in each row.
      EXPECT_EQ(image.width, 24);
      EXPECT_EQ(image.height, 16);
    }
    std::ranges::sort(names);
    return names;
  };
  EXPECT_EQ(run_train(args("run", {"--batch_size=64", "--ema.decay=0.5"})).exit_code, 0);
  EXPECT_THAT(pictures(),
              ::testing::ElementsAre("ema_samples-000000000023.png", "ema_samples-000000000046.png",
                                     "samples-000000000023.png", "samples-000000000046.png"));
  EXPECT_EQ(run_train(args("run", {"--batch_size=64", "--epochs=1", "--overwrite"})).exit_code, 0);
  EXPECT_THAT(pictures(), ::testing::ElementsAre("samples-000000000023.png"));
  // No metric selects the best network, so last.pt is the one to use.
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/best.pt"));
  EXPECT_FALSE(result_of(folder_ / "run").contains("best_epoch"));
  const auto exported = run_train({"export", "--config", folder_ / "run/config.yaml", "--format",
                                   "torch", "--output", folder_ / "gan.pth"});
  EXPECT_EQ(exported.exit_code, 0);
  EXPECT_THAT(exported.err, HasSubstr("run/last.pt as torch"));
  EXPECT_EQ(run_train(args("run", {"--batch_size=64", "--epochs=1", "--overwrite",
                                   "--checkpoint.keep_best.metric=fake_accuracy"}))
                .exit_code,
            0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/best.pt"));
  expect_mistake(
      run_train({"eval", "--config", folder_ / "run/config.yaml", "--tables", folder_ / "new"}),
      "--tables: task gan has none; leave the option out");
}

TEST_F(GanTest, IsCheckedWithoutARun) {
  const auto checked = run_train(Words{"check"} + args("run", {}));
  EXPECT_EQ(checked.exit_code, 0) << checked.err;
  EXPECT_THAT(checked.out, HasSubstr("all can be read"));
}

TEST_F(GanTest, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const Words& more, const std::string& message) {
    expect_mistake(run_train(args("run", more)), message);
  };
  refused({"--model=digits"}, "model digits: it generates no images");
  refused({"--task=classification"}, "model dcgan: it generates images; set task to gan");
  refused({"--freeze=[discriminator.*]"}, "freeze: all parameters of the discriminator are frozen");
  refused({"--early_stop.patience=2"}, "early_stop.patience: no metric of task gan tells");
  refused({"--data=synthetic", "--data.height=24", "--data.width=24"},
          "model dcgan: images must be square, with a side of 8, 16, 32, ... 512 pixels, got 24 x "
          "24");
}

}  // namespace
}  // namespace syncbn::test
