// Training on image files with a configuration.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <filesystem>
#include <string>
#include <vector>

#include "e2e/log_lines.h"
#include "e2e/train_program.h"
#include "support/python.h"

namespace syncbn::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kImages = 8;  // in each class and split

class ImageFolderTrainingTest : public ::testing::Test {
 protected:
  ImageFolderTrainingTest() {
    for (const char* split : {"train", "test"}) {
      // Coloured and grey images: two classes that are easy to learn.
      fill(split, "colour", "jpeg_444.jpg");
      fill(split, "grey", "png_grey8.png");
    }
    base::write_file_atomically(folder_ / "images.yaml", R"(
epochs: 2
batch_size: 4
model: {type: digits, width: 4}
sync_batchnorm: true
data:
  type: image_folder
  train: train
  test: test
  cache_dir: cache
  transforms:
    - {type: random_resized_crop, size: 8}
    - {type: random_horizontal_flip}
  test_transforms:
    - {type: resize, size: 8}
    - {type: center_crop, size: 8}
optimizer: {type: sgd, lr: 0.05}
)");
  }

  ProgramResult train(const std::string& run_dir, const Words& more = {}) const {
    return launch_train(2, Words{"--config", "images.yaml", "--run_dir", run_dir} + more,
                        folder_.path());
  }

  void fill(const std::string& split, const std::string& label, const std::string& image) const {
    const std::filesystem::path source =
        std::filesystem::path(SYNCBN_SOURCE_DIR) / "tests/data/images" / image;
    const std::filesystem::path target = std::filesystem::path(folder_.path()) / split / label;
    std::filesystem::create_directories(target);
    for (int i = 0; i < kImages; ++i) {
      const std::string name = fmt::format("{}{}", i, source.extension().string());
      std::filesystem::copy_file(source, target / name);
    }
  }

  TempFolder folder_;
};
using ImageFolderPredictTest = ImageFolderTrainingTest;

TEST_F(ImageFolderTrainingTest, LearnsFromFilesTheSameEveryTimeWithAnyNumberOfWorkers) {
  for (const auto& [run, workers] : {std::pair("first", "auto"), std::pair("second", "3")}) {
    const auto result = train(run, {"--loader.num_workers", workers, "--log_interval", "1"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("16 training and 16 test samples"));
    EXPECT_THAT(result.err, ContainsRegex("step 1/4 .* data wait [0-9.]+ %  "));
    EXPECT_THAT(result.err, ContainsRegex("epoch 2/2 .* data wait [0-9.]+ %  "));
  }
  const auto first = result_of(folder_ / "first");
  EXPECT_EQ(first["epochs"], 2);
  EXPECT_EQ(first["train_loss"], result_of(folder_ / "second")["train_loss"]);
  EXPECT_GT(log_of(folder_ / "first", "epoch").back()["data_wait_seconds"], 0);
}

TEST_F(ImageFolderPredictTest, PredictsWhatItEvaluatesOnAnyNumberOfRanks) {
  ASSERT_EQ(train("run", {"--ema.decay=0.5"}).exit_code, 0);
  std::string of_python;  // by the average in a file of Python's, which does not know the classes
  if (python_has_torch()) {
    const auto saved = run_program({python(), "-c", R"(
import sys, torch
run = torch.load(sys.argv[1] + "/run/best.pt", weights_only=True)
average = {"module." + name: tensor for name, tensor in run["ema"].items()}
torch.save({"model": run["model"], "model_ema": average}, sys.argv[1] + "/python.pth")
)",
                                    folder_.path()});
    ASSERT_EQ(saved.exit_code, 0) << saved.err;
    const auto result = launch_train(2,
                                     {"predict", "test", "--config=run/config.yaml",
                                      "--resume=python.pth", "--ema", "--output=python"},
                                     folder_.path());
    ASSERT_EQ(result.exit_code, 0) << result.err;
    of_python = base::read_file(folder_ / "python/predictions.csv");
  }
  std::filesystem::remove_all(folder_ / "train");  // predicting does not need the training data
  std::filesystem::copy_file(folder_ / "test/grey/0.png", folder_ / "test/grey/a,b.png");
  const auto predict = [&](int ranks, const std::string& output, const std::string& more) {
    return launch_train(ranks,
                        {"predict", "test", "--config=run/config.yaml", "--output=" + output, more},
                        folder_.path());
  };
  for (const int ranks : {1, 3}) {
    const auto result = predict(ranks, fmt::format("of{}", ranks), "--seed=0");
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }
  const std::string csv = base::read_file(folder_ / "of1/predictions.csv");
  EXPECT_EQ(base::read_file(folder_ / "of3/predictions.csv"), csv);
  EXPECT_THAT(csv, ::testing::StartsWith("file,class,probability\ncolour/0.jpg,"));
  EXPECT_THAT(csv, ContainsRegex("\n\"grey/a,b.png\",(grey|colour),0\\.[0-9]{6}\n"));
  EXPECT_EQ(count(csv, "\n"), 2 * kImages + 2);
  std::filesystem::remove(folder_ / "test/grey/a,b.png");
  EXPECT_EQ(predict(1, "average", "--ema").exit_code, 0);
  if (!of_python.empty()) {
    EXPECT_EQ(base::read_file(folder_ / "average/predictions.csv"), of_python);
  }
  EXPECT_NE(base::read_file(folder_ / "average/predictions.csv"), csv);

  const std::string run = "--config=run/config.yaml";
  const auto one =
      launch_train(2, {"predict", "test/colour/0.jpg", run, "--output=one"}, folder_.path());
  EXPECT_EQ(one.exit_code, 0);
  EXPECT_THAT(one.out, ContainsRegex("0.jpg,(grey|colour),0\\.[0-9]{6}\n"));
  EXPECT_THAT(base::read_file(folder_ / "one/predictions.csv"),
              ContainsRegex("^file,class,probability\n0.jpg,(grey|colour),0\\.[0-9]{6}\n$"));

  const auto refused = [&](const Words& args, const std::string& message) {
    expect_mistake(launch_train(2, args, folder_.path()), message);
  };
  refused({"predict", run}, "predict: name an image or a folder of them, then the run");
  refused({"predict", "test", run, "--output=of1"}, "of1 exists; choose another --output");
  refused({"predict", "nowhere", run}, "there is no file or folder nowhere");
  base::write_file_atomically(folder_ / "test/grey/a.webp", "");
  const auto partial = predict(1, "others", "--seed=0");
  EXPECT_THAT(partial.err, HasSubstr("left out: 1 file (.webp), such as 'grey/a.webp': neither"));
  expect_mistake(partial, "predict: 1 of 17 images left out: convert them to JPEG or PNG");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "others/predictions.csv"));
  const auto accepted = predict(1, "accepted", "--loader.on_error=skip");
  EXPECT_EQ(accepted.exit_code, 0) << accepted.err;
  EXPECT_THAT(accepted.err, HasSubstr("predictions.csv: 16 images (1 left out), by "));
  refused({"predict", "of1", run}, "there are no JPEG or PNG files in 'of1'");
  refused({run, "--ema"}, "--ema: only for train export, train predict");
  refused({"predict", "test", run, "-e"}, "--evaluate: only for train eval");
  base::write_file_atomically(folder_ / "test/grey/none.png", "no image");
  refused({"predict", "test", run}, "none.png': it is neither JPEG nor PNG");
  // Neither rank finds more than the budget allows.
  for (const int file : {0, 1, 2, 3, 4}) {
    base::write_file_atomically(folder_ / fmt::format("test/colour/{}.jpg", file), "no image");
  }
  const auto beyond = predict(2, "beyond", "--loader.on_error=skip");
  expect_mistake(beyond, "6 of 17 images could not be read, more than the 5 that");
  std::filesystem::remove_all(folder_ / "test");
  const auto exported =
      launch_train(1, {"export", run, "lr=0.1", "--output=network.pt"}, folder_.path());
  EXPECT_EQ(exported.exit_code, 0) << exported.err;
}

TEST_F(ImageFolderTrainingTest, AFileThatIsNoImageIsNamed) {
  base::write_file_atomically(folder_ / "train/grey/none.png", "no image");
  expect_mistake(train("run"), "none.png': it is neither JPEG nor PNG");
}

TEST_F(ImageFolderPredictTest, CheckNamesEverySampleThatARunCouldNotUse) {
  const auto check = [&](const Words& more = {}) {
    // An option of the ImageNet example, in the form that every command accepts.
    return run_train(Words{"check", "--config=images.yaml", "lr=0.1"} + more, {}, folder_.path());
  };
  base::write_file_atomically(folder_ / "train/grey/notes.txt", "mine");
  base::write_file_atomically(folder_ / "train/grey/x.gif", "GIF89a");
  const auto whole = check();
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_EQ(whole.out,
            "train: 16 samples, 2 classes of 8 samples; all can be read\n"
            "test: 16 samples, 2 classes of 8 samples; all can be read\n");
  EXPECT_THAT(whole.err,
              HasSubstr("image_folder: 'train': left out: 1 file (.gif), such as 'grey/x.gif'"));
  EXPECT_THAT(whole.err, HasSubstr("8 training samples of a class may be too few for a network"));

  const auto without_init =
      run_train({"check", "--config=images.yaml", "init=none.pth"}, {}, folder_.path());
  expect_mistake(without_init, "cannot read none.pth");
  EXPECT_EQ(without_init.out, "") << "found ahead of what takes long";

  base::write_file_atomically(folder_ / "train/grey/none.png", "no image");
  base::write_file_atomically(folder_ / "test/colour/none.png", "no image");
  // Damaged at the end, which no crop of these transforms would read.
  const std::string image = base::read_file(folder_ / "train/colour/0.jpg");
  base::write_file_atomically(folder_ / "train/colour/0.jpg", image.substr(0, image.size() - 40));
  const auto damaged = check();
  EXPECT_EQ(damaged.exit_code, base::kExitUsage);
  for (const auto& [index, file] : {std::pair(0, "train/colour/0.jpg"),
                                    {16, "train/grey/none.png"},
                                    {8, "test/colour/none.png"}}) {
    EXPECT_EQ(count(damaged.err,
                    fmt::format("cannot be used: sample {}: cannot decode '{}'", index, file)),
              1);
  }
  EXPECT_THAT(damaged.out, HasSubstr("2 classes, from 8 (colour) to 9 (grey) samples each; 2"));
  EXPECT_THAT(damaged.err,
              HasSubstr("check: 3 samples cannot be used; mend or remove the files, or train "
                        "without them: loader.on_error=skip\n"));
  EXPECT_EQ(train("run", {"--loader.on_error=skip", "--epochs=1"}).exit_code, 0) << "as check says";
  for (const int file : {2, 3, 4, 5}) {
    base::write_file_atomically(folder_ / fmt::format("train/colour/{}.jpg", file), "no image");
  }
  EXPECT_THAT(check().err, HasSubstr("train without them: loader.on_error=skip "
                                     "loader.error_budget=0.36\n"));
  EXPECT_THAT(check({"--loader.on_error=skip"}).err,
              HasSubstr("train without them: loader.error_budget=0.36\n"));
  EXPECT_THAT(check({"--loader.on_error=skip", "--loader.error_budget=0.5"}).err,
              HasSubstr("train without them, as loader.on_error: skip says\n"));
}

TEST_F(ImageFolderPredictTest, CheckNamesEachFileOnceAndWhatHasTheSameCauseInOneLine) {
  const auto check = [&](const Words& more = {}, const Env& env = {}) {
    return run_train(Words{"check", "--config=images.yaml"} + more, env, folder_.path());
  };
  for (int file = 0; file < kImages; ++file) {
    base::write_file_atomically(folder_ / fmt::format("train/colour/{}.jpg", file), "no image");
  }
  for (const char* file : {"a", "b", "c"}) {
    base::write_file_atomically(folder_ / fmt::format("test/grey/{}.png", file), "");
  }
  const auto damaged = check();
  EXPECT_EQ(damaged.exit_code, base::kExitUsage);
  EXPECT_EQ(count(damaged.err, "it is neither JPEG nor PNG"), 1) << damaged.err;
  EXPECT_THAT(damaged.err,
              ContainsRegex("cannot be used: sample 0: cannot decode 'train/colour/0.jpg': [^\n]*; "
                            "7 more: train/colour/1.jpg, train/colour/2.jpg, train/colour/3.jpg, "
                            "train/colour/4.jpg, train/colour/5.jpg, and 2 more\n"));
  EXPECT_EQ(count(damaged.err, "no sample of class"), 1) << damaged.err;
  EXPECT_THAT(damaged.err, HasSubstr("train, of what can be used: no sample of class colour\n"));
  // The remark on empty files, of which reading finds no more.
  EXPECT_THAT(damaged.err,
              HasSubstr("3 files (empty), such as 'test/grey/a.png' cannot be read: copy them "
                        "again, or remove them (`train check` decodes all images); 2 more: "
                        "test/grey/b.png, test/grey/c.png\n"));
  for (const char* file : {"colour/0.jpg", "colour/1.jpg", "grey/a.png", "grey/b.png"}) {
    EXPECT_EQ(count(damaged.err, file), 1) << file << damaged.err;
  }
  const auto each = check({}, {{"SYNCBN_LOG", "debug"}});
  EXPECT_EQ(count(each.err, "it is neither JPEG nor PNG"), kImages + 1) << each.err;

  for (int file = 0; file < kImages; ++file) {
    base::write_file_atomically(folder_ / fmt::format("train/grey/{}.png", file), "no image");
  }
  const auto none = check({"--loader.on_error=skip", "--loader.error_budget=1"});
  expect_mistake(none, "check: 19 samples cannot be used; mend or remove the files\n");
  EXPECT_THAT(none.out, HasSubstr("train: 16 samples, 2 classes of 8 samples; 16 cannot be used"));
}

TEST_F(ImageFolderPredictTest, CheckNamesEachFileOnceAlsoIfSomeAreHeldOut) {
  const std::vector<std::string> files = {"grey/a.png", "grey/b.png", "grey/c.png", "grey/d.png"};
  for (const std::string& file : files)
    base::write_file_atomically(folder_ / ("train/" + file), "");
  const auto damaged =
      run_train({"check", "--config=images.yaml", "--val_fraction=0.5"}, {}, folder_.path());
  expect_mistake(damaged, "check: 4 samples cannot be used");
  for (const std::string& file : files) EXPECT_EQ(count(damaged.err, file), 1) << damaged.err;
}

TEST_F(ImageFolderTrainingTest, AnEpochWithoutAnySampleEndsTheRun) {
  const Words skip = {"--loader.on_error=skip", "--loader.error_budget=1"};
  // Those of the first batches of both ranks.
  for (const int file : {0, 1, 2, 3}) {
    base::write_file_atomically(folder_ / fmt::format("train/colour/{}.jpg", file), "no image");
  }
  const Words one_step = {"--max_steps=1", "--batch_size=2", "--sampler.shuffle=false"};
  expect_mistake(train("step", skip + one_step),
                 "none of 4 training samples could be read; mend or replace the files that the "
                 "warnings name");
  EXPECT_EQ(train("steps", skip + one_step + Words{"--max_steps=2"}).exit_code, 0);
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "test/grey")) {
    base::write_file_atomically(entry.path(), "no image");
  }
  std::filesystem::remove_all(folder_ / "test/colour");
  expect_mistake(train("evaluation", skip), "none of 8 test samples could be read; mend or ");
  for (int i = 0; i < kImages; ++i) {
    base::write_file_atomically(folder_ / fmt::format("train/colour/{}.jpg", i), "");
    base::write_file_atomically(folder_ / fmt::format("train/grey/{}.png", i), "");
  }
  const auto refused = train("run", skip);
  expect_mistake(refused, "none of 16 training samples could be read; mend or replace the files");
  EXPECT_EQ(count(refused.err, "train: error:"), 1) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/last.pt"));
  expect_mistake(
      run_train(Words{"--config=images.yaml", "--run_dir=alone"} + skip, {}, folder_.path()),
      "none of 16 training samples could be read");
}

TEST_F(ImageFolderTrainingTest, AFileThatIsNoImageIsLeftOutIfAskedToWithinABudget) {
  // Neither of the two ranks finds more damaged files than the budget allows; together they do.
  for (const int file : {1, 2, 3, 4, 5}) {
    base::write_file_atomically(folder_ / fmt::format("train/colour/{}.jpg", file), "no image");
  }
  const Words skip = {"--loader.on_error=skip", "--epochs=1"};
  const auto within = train("within", skip);
  EXPECT_EQ(within.exit_code, 0) << within.err;
  EXPECT_THAT(within.err, ContainsRegex("cannot be used: sample [0-9]+: .*5.jpg"));
  base::write_file_atomically(folder_ / "train/grey/none.png", "no image");
  const auto beyond = train("beyond", skip);
  EXPECT_EQ(beyond.exit_code, base::kExitUsage) << beyond.err;
  EXPECT_THAT(beyond.err,
              ContainsRegex("[67] of 18 training samples could not be read, more than the 5 that "
                            "loader.error_budget \\(5 %\\) allows; mend or remove"));
  EXPECT_EQ(count(beyond.err, "train: error:"), 1) << beyond.err;
  const auto evaluation = train("evaluation", {"--loader.on_error=skip", "--loader.error_budget=0",
                                               "--data.train=test", "--data.test=train"});
  EXPECT_EQ(evaluation.exit_code, base::kExitUsage) << evaluation.err;
  EXPECT_THAT(evaluation.err,
              HasSubstr("1 of 17 test samples could not be read, more than the 0 that "));
  EXPECT_THAT(base::read_file(folder_ / "beyond/log.jsonl"),
              ContainsRegex(R"("event":"end",[^\n]*"reason":"an error: )"));
}

TEST_F(ImageFolderTrainingTest, ABatchWithoutAnySampleLeftDoesNotEndTheRun) {
  base::write_file_atomically(folder_ / "train/grey/none.png", "no image");
  const Words skip = {"--loader.on_error=skip", "--loader.error_budget=0.2", "--batch_size=1",
                      "--epochs=1"};
  for (const auto& [run, more] : std::vector<std::pair<std::string, Words>>{
           {"sync", {}},
           {"local", {"--sync_batchnorm=false"}},
           {"mixed", {"--task.mixup=0.5", "--amp=bf16", "--clip.norm=1", "--update_bn_stats=9"}}}) {
    const auto result = train(run, skip + more);
    EXPECT_EQ(result.exit_code, 0) << run << result.err;
    EXPECT_THAT(result.err, ContainsRegex("cannot be used: sample [0-9]+: .*none.png")) << run;
    EXPECT_EQ(result_of(folder_ / run)["steps"], 9) << run;
    EXPECT_GT(result_of(folder_ / run)["train_loss"], 0) << run;
  }
  // Both samples of rank 0's first batch, which is divided into two parts.
  base::write_file_atomically(folder_ / "train/colour/0.jpg", "no image");
  base::write_file_atomically(folder_ / "train/colour/2.jpg", "no image");
  for (const char* sync : {"true", "false"}) {
    const auto result = train(
        std::string("parts") + sync,
        {"--loader.on_error=skip", "--loader.error_budget=0.5", "--batch_size=2", "--accumulate=2",
         "--sampler.shuffle=false", std::string("--sync_batchnorm=") + sync, "--log_interval=1"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, ContainsRegex("step 1/.* loss [0-9.]+ ")) << result.err;
  }
}

TEST_F(ImageFolderTrainingTest, ABatchThatBecomesTooSmallForBatchNormDoesNotEndTheRun) {
  // Of the first batch of both ranks, only one sample of rank 1 is left.
  for (const int file : {0, 1, 2}) {
    base::write_file_atomically(folder_ / fmt::format("train/colour/{}.jpg", file), "no image");
  }
  for (const char* sync : {"true", "false"}) {
    const auto result =
        train(std::string("sync-") + sync,
              {"--loader.on_error=skip", "--loader.error_budget=0.5", "--batch_size=2",
               "--model=resnet18", "--sampler.shuffle=false", "--update_bn_stats=4", "--epochs=1",
               std::string("--sync_batchnorm=") + sync});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.err, "left out of a step: 1 sample of a batch"), 1) << result.err;
  }
}

TEST_F(ImageFolderTrainingTest, AnEpochIsNotLostToATestImageThatCannotBeRead) {
  base::write_file_atomically(folder_ / "test/colour/none.png", "no image");
  expect_mistake(train("run"), "none.png': it is neither JPEG nor PNG");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/last.pt"));

  const auto resumed = train(
      "run", {"--resume=auto", "--loader.on_error=skip", "--loader.error_budget=1", "--epochs=4"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("at epoch 2, step 2"));
  EXPECT_THAT(resumed.err, ContainsRegex("cannot be used: sample [0-9]+: .*none.png"));
  EXPECT_EQ(count(resumed.err, "none.png"), 1) << resumed.err;
  EXPECT_EQ(result_of(folder_ / "run")["epochs"], 4);
}

TEST_F(ImageFolderTrainingTest, NamesTheClassesAndSaysThatABatchIsAnEpoch) {
  for (const char* split : {"train", "test"}) fill(split, "pale", "png_rgb8.png");
  const auto result = train("run", {"--batch_size=1000", "--epochs=1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "3 classes: colour, grey, pale\n"), 1) << result.err;
  EXPECT_EQ(count(result.err,
                  "a batch of 1000 is more than the 12 samples of a rank: an epoch is one step\n"),
            1)
      << result.err;
  EXPECT_EQ(result_of(folder_ / "run")["steps"], 1);
}

TEST_F(ImageFolderTrainingTest, WarnsOfASingleClass) {
  for (const char* split : {"train", "test"}) {
    std::filesystem::remove_all(folder_ / split / "grey");
  }
  const auto result = train("run", {"--epochs=1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "1 class: colour\n"), 1) << result.err;
  EXPECT_EQ(
      count(result.err, "the data has one class only: every network is right without training\n"),
      1)
      << result.err;
}

TEST_F(ImageFolderTrainingTest, DropLastLeavesOutTheSmallBatchOfTrainingAlone) {
  const auto dropped = train("run", {"--batch_size", "5", "--loader.drop_last", "true"});
  ASSERT_EQ(dropped.exit_code, 0) << dropped.err;
  EXPECT_EQ(result_of(folder_ / "run")["steps"], 2) << "8 samples a rank: one batch an epoch";
  EXPECT_THAT(dropped.err, HasSubstr("16 test samples"));
  expect_mistake(train("none", {"--batch_size", "9", "--loader.drop_last", "true"}),
                 "loader.drop_last: a rank has 8 samples per epoch");
}

TEST_F(ImageFolderTrainingTest, NamesFilesThatItCannotDecodeAtTheStart) {
  base::write_file_atomically(folder_ / "train/colour/x.webp", "RIFF");
  base::write_file_atomically(folder_ / "train/grey/y.BMP", "BM");
  base::write_file_atomically(folder_ / "test/grey/z.png", "");
  expect_mistake(train("run"),
                 "data: 2 files (1 .BMP, 1 .webp), such as 'train/colour/x.webp' cannot be read: "
                 "convert them to JPEG or PNG (ImageMagick: mogrify -format png FILE), mend or "
                 "remove them");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  const auto result = run_train({"--config", "images.yaml", "--run_dir", "run",
                                 "--loader.on_error=skip", "--loader.error_budget=0.5"},
                                {}, folder_.path());
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("left out: 2 files (1 .BMP, 1 .webp), such as 'train/colour/x.webp' "
                        "cannot be read"));
  EXPECT_THAT(result.err, HasSubstr("left out: 1 file (empty), such as 'test/grey/z.png' cannot"));
}

TEST_F(ImageFolderTrainingTest, SaysAtTheStartWhatIsOftenAMistake) {
  std::filesystem::remove_all(folder_ / "test/grey");
  fill("train", "colour/turned", "exif_6.jpg");
  base::write_file_atomically(folder_ / "train/colour/x.gif", "GIF89a");
  const auto run = train("run", {"--epochs=1"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const std::string text : {"train: 8 of 24 images are stored rotated",
                                 "image_folder: 'train': left out: 1 file (.gif), such as",
                                 "test: no sample of class grey\n"}) {
    EXPECT_EQ(count(run.err, text), 1) << text << run.err;
  }
  EXPECT_TRUE(result_of(folder_ / "run")["test_accuracy_grey"].is_null());
  fill("test", "turned", "exif_6.jpg");
  const auto predicted =
      launch_train(2, {"predict", "test", "run", "--output=answers"}, folder_.path());
  EXPECT_EQ(predicted.exit_code, 0) << predicted.err;
  EXPECT_EQ(count(predicted.err, "8 of 16 images are stored rotated"), 1) << predicted.err;
  EXPECT_EQ(count(predicted.err, "no sample of class"), 0) << predicted.err;
  std::filesystem::rename(folder_ / "test/turned", folder_ / "test/grey");
  const auto evaluated = launch_train(2, {"eval", "run"}, folder_.path());
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.err;
  EXPECT_EQ(count(evaluated.err, "test: 8 of 16 images are stored rotated"), 1) << evaluated.err;
}

TEST_F(ImageFolderTrainingTest, ALastBatchOfOneIsFoundAtTheStart) {
  std::filesystem::remove(folder_ / "train/grey/0.png");  // 15 are left
  const Words small = {"--model={type: resnet18}", "--batch_size=7", "--epochs=1"};
  const auto run = [&](const std::string& name, const Words& more) {
    return run_train(Words{"--config=images.yaml", "--run_dir=" + name} + small + more, {},
                     folder_.path());
  };
  const std::string said = "leave a last batch of 1, and batch norm";
  expect_mistake(run("run", {}), "loader.drop_last: 15 training samples in batches of 7 " + said);
  expect_mistake(train("run", small + Words{"--sync_batchnorm=false"}),
                 "8 training samples per rank in batches of 7 " + said);
  // Parts of 2 samples and 1.
  const Words replicas = {"--batch_size=6", "--parallel.mode=data_parallel",
                          "--parallel.devices=[cpu, cpu]"};
  for (const Words& more :
       {Words{"--batch_size=6", "--accumulate=2"}, replicas + Words{"--sync_batchnorm=false"}}) {
    expect_mistake(run("run", more), "in batches of 6 leave a last batch of 3 in 2 parts, and");
  }
  expect_mistake(run("run", {"--batch_size=4", "--accumulate=4"}),
                 "accumulate: 15 training samples in batches of 4 leave single samples in 4 parts");
  expect_mistake(run("run", {"--batch_size=1"}),
                 "batch_size: 15 training samples in batches of 1 leave single samples, and batch "
                 "norm of this network cannot train on a single sample; give each rank at least 2 "
                 "samples in a step\n");
  expect_mistake(
      train("run", small + Words{"--sync_batchnorm=false", "--batch_size=1"}),
      "batch_size: 8 training samples per rank in batches of 1 leave single samples, and "
      "batch norm of this network cannot train on a single sample; give each rank at least 2 "
      "samples in a step, or sync_batchnorm=true");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  // Under a launcher, a check is about all ranks, and rank 0 alone makes it.
  const auto check_on_two = [&](const Words& more) {
    return launch_train(2, Words{"check", "--config=images.yaml"} + small + more, folder_.path());
  };
  for (const Words& more : {Words{"--sync_batchnorm=false"}, {"--sync_batchnorm_group=1"}}) {
    expect_mistake(check_on_two(more), "8 training samples per rank in batches of 7 " + said);
  }
  expect_mistake(check_on_two({"--sync_batchnorm_group=4"}), "2 ranks cannot be divided into");
  const auto of_two = check_on_two({});
  EXPECT_EQ(of_two.exit_code, 0) << of_two.err;
  EXPECT_EQ(count(of_two.out, "train: 15 samples"), 1) << of_two.out;
  // Without one, it only warns: more ranks divide the samples differently.
  const std::string in_batches = "15 training samples in batches of ";
  for (const auto& [more, message] : std::vector<std::pair<Words, std::string>>{
           {{"--schedule=constant", "--schedule.warmup=9ep"},
            "schedule.warmup takes 27 steps and the run 3: the learning"},
           {{"--sync_batchnorm_group=4"},
            "on one rank: loader.drop_last: " + in_batches + "7 " + said},
           {{"--batch_size=4", "--accumulate=4"}, "on one rank: accumulate: " + in_batches + "4 "},
           {{"--batch_size=1"}, "on one rank: batch_size: " + in_batches + "1 leave single"},
           {replicas + Words{"--sync_batchnorm=false"},
            "on one rank: loader.drop_last: " + in_batches + "6 leave a last batch of 3 in 2"}}) {
    const auto checked =
        run_train(Words{"check", "--config=images.yaml"} + small + more, {}, folder_.path());
    EXPECT_EQ(checked.exit_code, 0) << checked.err;
    EXPECT_THAT(checked.err, HasSubstr(message));
    EXPECT_THAT(checked.out,
                HasSubstr("from 7 (grey) to 8 (colour) samples each; all can be read"));
  }
  for (const Words& more : {Words{"--loader.drop_last=true"}, {"--max_steps=1"}, replicas}) {
    const auto good = run(more.front().substr(2, 5), more);
    EXPECT_EQ(good.exit_code, 0) << good.err;
  }
}

TEST_F(ImageFolderTrainingTest, AResumedRunFindsALastBatchOfOneThatIsStillToCome) {
  std::filesystem::remove(folder_ / "train/grey/0.png");  // 15 are left
  const auto run = [&](const Words& more) {
    return run_train(Words{"--config=images.yaml", "--run_dir=run", "--model={type: resnet18}",
                           "--resume=auto"} +
                         more,
                     {}, folder_.path());
  };
  const auto begun = run({"--batch_size=5", "--max_steps=2"});
  ASSERT_EQ(begun.exit_code, 0) << begun.err;
  // The first epoch ends with the five samples that are left of it, the second with one.
  expect_mistake(run({"--batch_size=7"}),
                 "15 training samples in batches of 7 leave a last batch of 1");
  const auto good = run({"--batch_size=7", "--epochs=1"});
  EXPECT_EQ(good.exit_code, 0) << good.err;
}

TEST_F(ImageFolderTrainingTest, LookingForALastBatchOfOneDoesNotChangeTheRun) {
  std::filesystem::remove(folder_ / "train/grey/0.png");  // 15 are left
  const auto run = [&](const std::string& name, const Words& more = {}) {
    // Two batches of 7, and one of a single image, whose batch norm has many values per channel.
    const auto result = run_train(Words{"--config=images.yaml", "--run_dir=" + name,
                                        "--batch_size=7", "--model.dropout=0.5", "--resume=auto"} +
                                      more,
                                  {}, folder_.path());
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  run("whole");
  run("parts", {"--max_steps=4"});
  run("parts");
  expect_same_run(checkpoint_of(folder_ / "whole/last.pt"),
                  checkpoint_of(folder_ / "parts/last.pt"));
}

TEST_F(ImageFolderTrainingTest, NamesEmptyFilesBeforeADryRun) {
  base::write_file_atomically(folder_ / "test/grey/z.png", "");
  const auto refused = run_train({"--config", "images.yaml", "--dry_run"}, {}, folder_.path());
  expect_mistake(refused, "data: 1 file (empty), such as 'test/grey/z.png' cannot be read");
  EXPECT_THAT(refused.err, HasSubstr("`train check` decodes all images"));
}

TEST_F(ImageFolderTrainingTest, BlamesTheOptionThatNamesTheData) {
  fill("other", "colour", "jpeg_444.jpg");
  fill("other", "grey", "png_grey8.png");
  base::write_file_atomically(folder_ / "other/grey/z.png", "");
  const auto run = [&](const std::string& option) {
    return run_train({"--config", "images.yaml", option}, {}, folder_.path());
  };
  expect_mistake(run("--data.test=other"),
                 "train: error: --data.test: data: 1 file (empty), such as 'other/grey/z.png'");
  // The message names no file: the option need not be the mistake.
  expect_mistake(run("--data.val=train"),
                 "train: error: images.yaml:7:3: data: the validation split is the training split");
}

}  // namespace
}  // namespace syncbn::test
