// A generative adversarial network on the digits, the smallest images that it can generate.
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/data/image.h>
#include <syncbn/train/checkpoint.h>

#include <filesystem>
#include <string>
#include <vector>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;
using train::Checkpoint;

class GanTest : public ::testing::Test {
 protected:
  std::vector<std::string> args(const std::string& name,
                                const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"--config",
                                    shipped_config("digits.yaml"),
                                    "--run_dir",
                                    folder_ / name,
                                    "--sampler=distributed",
                                    "--task={type: gan, samples: 6}",
                                    "--model={type: dcgan, latent_size: 5, generator_width: 6, "
                                    "discriminator_width: 4}",
                                    "--optimizer={type: sgd, lr: 0.05}",
                                    "--epochs=2"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  Checkpoint load(const std::string& name) const {
    const std::string file = folder_ / (name + "/last.pt");
    return train::parse_checkpoint(base::read_file(file), file);
  }

  TempFolder folder_;
};

TEST_F(GanTest, IsTheSameOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2}) {
    run_ranks_of_train(ranks, args(std::to_string(ranks),
                                   {"--max_steps=20", fmt::format("--batch_size={}", 32 / ranks)}));
  }
  const auto one = load("1");
  const auto two = load("2");
  for (const auto& [name, tensor] : one.model) {
    EXPECT_TRUE(at::allclose(tensor, two.model.at(name), 1e-3, 1e-4)) << name;
  }
  const auto result = result_of(folder_ / "1");
  EXPECT_NEAR(result["test_loss"], result_of(folder_ / "2")["test_loss"], 1e-3);
  EXPECT_EQ(result["test_real_accuracy"], result_of(folder_ / "2")["test_real_accuracy"]);
}

TEST_F(GanTest, GoesOnBitForBit) {
  const std::vector<std::string> everything = {"--accumulate=2",   "--ema.decay=0.9",
                                               "--clip.norm=1",    "--amp=bf16",
                                               "--optimizer=adam", "--checkpoint.every=7step"};
  auto first = everything;
  first.emplace_back("--max_steps=61");
  run_ranks_of_train(2, args("whole", everything));
  run_ranks_of_train(2, args("parts", first));
  auto on = everything;
  on.emplace_back("--resume=auto");
  run_ranks_of_train(2, args("parts", on));
  const auto whole = load("whole");
  const auto parts = load("parts");
  EXPECT_EQ(whole.step, parts.step);
  for (const auto& [name, tensor] : whole.model) {
    EXPECT_TRUE(at::equal(tensor, parts.model.at(name))) << name;
  }
  for (const auto& [name, tensors] : whole.optimizer) {
    for (const auto& [key, tensor] : tensors) {
      EXPECT_TRUE(at::equal(tensor, parts.optimizer.at(name).at(key))) << name << " " << key;
    }
  }
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
  const auto tables =
      run_train({"eval", "--config", folder_ / "run/config.yaml", "--tables", folder_ / "new"});
  EXPECT_EQ(tables.exit_code, base::kExitUsage);
  EXPECT_THAT(tables.err, HasSubstr("--tables: task gan has none; leave the option out"));
}

TEST_F(GanTest, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& message) {
    const auto result = run_train(args("run", more));
    EXPECT_EQ(result.exit_code, base::kExitUsage);
    EXPECT_THAT(result.err, HasSubstr(message));
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
