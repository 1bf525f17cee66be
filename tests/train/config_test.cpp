#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/config/command_line.h>
#include <syncbn/config/layers.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/command.h>
#include <syncbn/train/config.h>

#include <filesystem>
#include <optional>
#include <utility>

#include "commands/program_options.h"
#include "commands/resolved_config.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> read(const std::string& yaml, Config& config) {
  config::Faults faults;
  config::Schema<Config>::get().read(config::parse_yaml(yaml, "a.yaml"), config, "", faults);
  return faults.messages();
}

constexpr const char* kLeast = "model: digits\ndata: digits\n";

TEST(ConfigTest, EveryShippedConfigurationIsRead) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(SYNCBN_SOURCE_DIR "/configs")) {
    Config config;
    config::Faults faults;
    config::Schema<Config>::get().read(config::load_files({entry.path()}, faults), config, "",
                                       faults);
    EXPECT_THAT(faults.messages(), IsEmpty()) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 2);
}

TEST(ConfigTest, TheTwoDigitsConfigurationsDifferInBatchNormOnly) {
  Config sync;
  Config local;
  ASSERT_THAT(read(base::read_file(SYNCBN_SOURCE_DIR "/configs/digits.yaml"), sync), IsEmpty());
  ASSERT_THAT(read(base::read_file(SYNCBN_SOURCE_DIR "/configs/digits-local-bn.yaml"), local),
              IsEmpty());
  EXPECT_TRUE(sync.sync_batchnorm);
  EXPECT_FALSE(local.sync_batchnorm);
  // PyTorch's default, so that the evaluation uses rank 0's statistics.
  EXPECT_TRUE(local.ddp.broadcast_buffers);
  local.sync_batchnorm = true;
  local.ddp.broadcast_buffers = sync.ddp.broadcast_buffers;
  const auto& schema = config::Schema<Config>::get();
  EXPECT_EQ(config::to_yaml(schema.write(sync)), config::to_yaml(schema.write(local)));
}

TEST(ConfigTest, NeedsModelDataAndABatchSize) {
  const auto faults = [](const std::string& yaml) {
    Config config;
    return read(yaml, config);
  };
  EXPECT_THAT(
      faults("epochs: 1\nbatch_size: 4\n"),
      ElementsAre(HasSubstr("the key 'model' is missing"), HasSubstr("the key 'data' is missing")));
  const std::string least = kLeast;
  EXPECT_THAT(faults(least), ElementsAre(HasSubstr("exactly one of batch_size")));
  EXPECT_THAT(faults(least + "batch_size: 4\nglobal_batch_size: 8\n"),
              ElementsAre(HasSubstr("exactly one of batch_size")));
  EXPECT_THAT(faults(least + "batch_size: 4\n"), IsEmpty());
}

TEST(ConfigTest, DividesTheGlobalBatchOrNamesBothNumbers) {
  Config config;
  ASSERT_THAT(read(std::string(kLeast) + "global_batch_size: 12\n", config), IsEmpty());
  EXPECT_EQ(config.local_batch_size(3), 4);
  EXPECT_THAT(test::message_of<base::UserError>([&] { config.local_batch_size(5); }),
              HasSubstr("12 samples cannot be divided evenly between 5 ranks"));
}

TEST(ConfigTest, NamesWhatAFileIsThatIsNoConfiguration) {
  const test::TempFolder folder;
  fs::create_symlink("nope.yaml", folder / "link.yaml");
  for (const auto& [file, why] : std::vector<std::pair<std::string, std::string>>{
           {folder / "link.yaml", "it is a link to 'nope.yaml', which does not exist"},
           {folder.write("lfs.yaml", "version https://git-lfs.github.com/spec/v1\n"),
            "it is a pointer of Git LFS"}}) {
    EXPECT_THAT(test::message_of<base::UserError>([&] {
                  config::Faults faults;
                  resolve_config(parse_arguments(kTraining, {"--config", file}, faults), faults);
                }),
                ::testing::StartsWith("cannot read " + file + ": " + why));
  }
}

TEST(ConfigTest, TheCommandLinesBatchSizeReplacesTheFilesWhicheverKeyTheySet) {
  using Sizes = std::pair<std::optional<int64_t>, std::optional<int64_t>>;
  const test::TempFolder folder;
  const auto sizes = [](const std::vector<std::string>& words) {
    config::Faults faults;
    const auto line = parse_arguments(kTraining, words, faults);
    const Config config = resolve_config(line, faults).config;
    return Sizes(config.batch_size, config.global_batch_size);
  };
  for (const std::string key : {"batch_size", "global_batch_size"}) {
    const std::string file = folder.write(key + ".yaml", kLeast + key + ": 32\n");
    EXPECT_EQ(sizes({file, "-b", "8"}), Sizes(8, std::nullopt));
    EXPECT_EQ(sizes({file, "--batch-size", "8"}), Sizes(8, std::nullopt));
    EXPECT_EQ(sizes({file, "batch_size=8"}), Sizes(8, std::nullopt));
    EXPECT_EQ(sizes({file, "--global_batch_size=8"}), Sizes(std::nullopt, 8));
    EXPECT_EQ(sizes({file, "-b", "8", "--global_batch_size=null"}), Sizes(8, std::nullopt));
    EXPECT_THAT(test::message_of<base::UserError>([&] {
                  sizes({file, "-b", "8", "--global_batch_size=8"});
                }),
                HasSubstr("exactly one of batch_size"));
  }
}

TEST(ConfigTest, RefusesNumbersThatAreTypingErrors) {
  const std::vector<std::pair<std::string, std::string>> faults = {
      {"epochs", "9223372036854775807"},
      {"batch_size", "4611686018427387904"},
      {"ddp.bucket_cap_mb", "1e308"},
      {"model.width", "1000000000"},
      {"data.size", "4611686018427387904"},
      {"data.test_size", "4611686018427387904"},
      {"data.channels", "1000000000"},
      {"data.height", "1000000000"},
      {"data.width", "1000000000"},
      {"data.classes", "1000000000000"},
      {"optimizer.lr", "1e308"},
      {"optimizer.weight_decay", "1e300"},
      {"timeout", "1e-9"},
      {"connect_timeout", "1e-9"},
      {"schedule.warmup", "1e308"},
      {"schedule.min_lr", "1e308"},
      {"loader.num_workers", "-1"},
      {"loader.num_workers", "1000000"},
      {"loader.prefetch", "0"},
      {"loader.timeout", "-1"},
      {"loader.error_budget", "5"},
  };
  for (const auto& [key, value] : faults) {
    config::CommandLine line;
    config::Faults found;
    line = config::parse_command_line({"--" + key, value}, {}, config_fields(), found);
    config::Value yaml = config::parse_yaml(
        "model: digits\ndata: synthetic\nbatch_size: 1\nschedule: cosine\n", "a");
    config::merge(line.overrides, yaml, found);
    Config config;
    config::Schema<Config>::get().read(yaml, config, "", found);
    EXPECT_THAT(found.messages(), ElementsAre(HasSubstr(key + ": must be "))) << value;
  }
}

TEST(ConfigTest, TheLoadersKeysAreItsOptions) {
  Config config;
  ASSERT_THAT(read(std::string(kLeast) + "batch_size: 4\n", config), IsEmpty());
  const data::LoaderOptions plain = config.loader.options(4, at::kCPU);
  const data::LoaderOptions defaults;
  EXPECT_EQ(plain.batch_size, 4);
  EXPECT_EQ(plain.num_workers, data::kAutoWorkers);
  EXPECT_EQ(plain.prefetch, defaults.prefetch);
  EXPECT_EQ(plain.timeout, defaults.timeout);
  EXPECT_EQ(plain.on_error, defaults.on_error);
  EXPECT_EQ(plain.error_budget, defaults.error_budget);
  ASSERT_THAT(read(std::string(kLeast) +
                       "batch_size: 4\nloader: {num_workers: 3, prefetch: 5, pin_memory: true, "
                       "drop_last: true, timeout: 0.0001, on_error: skip, error_budget: 0.5}\n",
                   config),
              IsEmpty());
  const data::LoaderOptions all = config.loader.options(4, at::kCUDA);
  EXPECT_EQ(all.num_workers, 3);
  EXPECT_EQ(all.prefetch, 5);
  EXPECT_TRUE(all.pin_memory);
  EXPECT_FALSE(config.loader.options(4, at::kCPU).pin_memory) << "there is no GPU";
  EXPECT_TRUE(all.drop_last);
  EXPECT_EQ(all.timeout, std::chrono::milliseconds(1)) << "0 would be no limit";
  EXPECT_EQ(all.on_error, data::LoaderOptions::OnError::kSkip);
  EXPECT_EQ(all.error_budget, 0.5);
}

TEST(ConfigTest, RefusesImagesThatAreTooLargeAsAWhole) {
  Config config;
  EXPECT_THAT(read("model: digits\nbatch_size: 1\n"
                   "data: {type: synthetic, channels: 4096, height: 16384, width: 16384}\n",
                   config),
              ElementsAre(HasSubstr("a.yaml:3:7: data: an image of 4096 x 16384 x 16384")));
}

TEST(ConfigTest, TheDeviceChoosesTheBackend) {
  Config config;
  EXPECT_EQ(config.chosen_backend(), "auto");
  config.backend = "gloo";
  EXPECT_EQ(config.chosen_backend(), "gloo");
  config.device = "cpu";
  EXPECT_EQ(config.chosen_backend(), "gloo");
  config.device = "cuda";
  EXPECT_EQ(config.chosen_backend(), "cuda:gloo");
  config.backend = "auto";
  EXPECT_EQ(config.chosen_backend(), "nccl");
  EXPECT_EQ(config.gpu(), std::nullopt);
  config.device = "cuda:12";
  EXPECT_EQ(config.chosen_backend(), "nccl");
  EXPECT_EQ(config.gpu(), 12);
  const std::string needed = "model: digits\ndata: digits\nbatch_size: 1\n";
  config::Faults faults;
  const auto read = [&](const std::string& text) {
    config::Schema<Config>::get().read(config::parse_yaml(needed + text, "a.yaml"), config, "",
                                       faults);
  };
  read("device: cpu\nbackend: nccl\n");
  read("device: cuda\nbackend: gloo\n");
  read("device: cpu\nbackend: gloo\n");
  for (const std::string bad : {"cuda:", "cuda:x", "cuda:-1", "cuda12", "gpu"}) {
    config::Faults all;
    EXPECT_FALSE(config::Schema<Config>::get().read(
        config::parse_yaml(needed + "device: \"" + bad + "\"\n", "a.yaml"), config, "", all));
    EXPECT_THAT(all.messages(), ElementsAre("a.yaml:4:9: device: must be auto, cpu, cuda or "
                                            "cuda:N, got " +
                                            bad));
  }
  config.device = "auto";
  EXPECT_EQ(faults.messages(),
            (std::vector<std::string>{"a.yaml:4:9: device: cpu does not go with backend: nccl, "
                                      "which is for GPUs; set only one"}));
}

TEST(ConfigTest, OptionsOfNcclReachTheProcessGroup) {
  Config config;
  EXPECT_THAT(read(std::string(kLeast) +
                       "batch_size: 1\nnccl: {high_priority: false, min_ctas: 3, max_ctas: 5, "
                       "blocking: false, register_buckets: true}\n",
                   config),
              IsEmpty());
  const dist::NcclOptions& options = config.nccl;
  EXPECT_FALSE(options.high_priority);
  EXPECT_EQ(options.min_ctas, 3);
  EXPECT_EQ(options.max_ctas, 5);
  EXPECT_FALSE(options.blocking);
  EXPECT_TRUE(options.register_buckets);
  const dist::NcclOptions usual;
  const dist::NcclOptions by_default = Config().nccl;
  EXPECT_EQ(by_default.high_priority, usual.high_priority);
  EXPECT_EQ(by_default.min_ctas, usual.min_ctas);
  EXPECT_EQ(by_default.max_ctas, usual.max_ctas);
  EXPECT_EQ(by_default.blocking, usual.blocking);
  EXPECT_EQ(by_default.register_buckets, usual.register_buckets);
}

TEST(ConfigTest, AKeyOfFormerVersionsNamesWhatToDoUnlessItHasItsFormerDefault) {
  Config config;
  const std::string needed = std::string(kLeast) + "batch_size: 1\n";
  EXPECT_THAT(read(needed + "cuda_graph: false\nnccl: {peer_memory: true}\n", config), IsEmpty());
  EXPECT_THAT(read(needed + "cuda_graph: true\n", config),
              ElementsAre(HasSubstr("unknown key 'cuda_graph'; it was removed; leave it out")));
  config::Faults faults;
  config::parse_command_line({"--cuda_graph"}, {}, config_fields(), faults);
  EXPECT_THAT(faults.messages(), ElementsAre(HasSubstr("unknown option '--cuda_graph'; it was")));
}

TEST(ConfigTest, AKeyOfOtherProgramsNamesWhatToDo) {
  const std::vector<std::pair<std::string, std::string>> keys = {
      {"num_classes", "the number of classes comes from the data"},
      {"pretrained", "leave it out; to begin with trained weights, write init: FILE"}};
  for (const auto& [key, advice] : keys) {
    const std::string said = fmt::format("'model.{}'; {}", key, advice);
    for (const char* value : {"5", "true", "null", ""}) {
      Config config;
      const std::string file =
          fmt::format("model: {{type: digits, {}: {}}}\ndata: digits\nbatch_size: 1\n", key, value);
      EXPECT_THAT(read(file, config), ElementsAre(HasSubstr("unknown key " + said))) << value;
    }
    config::Faults faults;
    config::parse_command_line({"model." + key + "=5"}, {}, config_fields(), faults);
    EXPECT_THAT(faults.messages(), ElementsAre(HasSubstr("unknown key " + said)));
  }
}

/// The message of with_place() about a mistake, "file" for the file's path.
std::string placed(const std::vector<std::string>& words, const std::string& mistake) {
  const test::TempFolder folder;
  const std::string file = folder.write(
      "a.yaml", "model: digits\nbatch_size: 4\ndata:\n  type: image_folder\n  train: x\n");
  std::vector<std::string> all = {file};
  all.insert(all.end(), words.begin(), words.end());
  config::Faults faults;
  const ResolvedConfig resolved = resolve_config(parse_arguments(kTraining, all, faults), faults);
  std::string message = test::message_of<base::UserError>(
      [&] { with_place(resolved, [&] { throw base::UserError(mistake); }); });
  if (message.starts_with(file)) message.replace(0, file.size(), "file");
  return message;
}

TEST(ConfigTest, AMistakeInAFileOfTheDataNamesTheOptionThatGaveIt) {
  EXPECT_EQ(placed({}, "data.train: missing"), "file:5:10: data.train: missing");
  EXPECT_EQ(placed({"data.train=y"}, "data.train: missing"), "data.train: missing");
  EXPECT_EQ(placed({}, "data: classes"), "file:4:3: data: classes");
  EXPECT_EQ(placed({"--data.train", "y"}, "data: 'y/a' is"), "--data.train: data: 'y/a' is");
  EXPECT_EQ(placed({"data.val=z", "data.test=y"}, "data: 'y' is"), "data.test: data: 'y' is");
  EXPECT_EQ(placed({"data.test=y"}, "data: any 'x'"), "file:4:3: data: any 'x'");
  EXPECT_EQ(placed({"data.test="}, "data: 'x/a' is"), "file:4:3: data: 'x/a' is");
  EXPECT_EQ(placed({"data.high_bits=clamp"}, "data: 'clamp'"), "file:4:3: data: 'clamp'");
  EXPECT_EQ(placed({"data.test=y"}, "cannot read y"), "cannot read y");
  EXPECT_EQ(placed({"data.test=y"}, "image_folder: 'y'"), "image_folder: 'y'");
}

TEST(ConfigTest, ReferenceInDocsIsUpToDate) {
  const std::string page = SYNCBN_SOURCE_DIR "/docs/config.md";
  EXPECT_TRUE(base::read_file(page) == config_reference())
      << page << " is out of date; make it anew with: build/bin/train --print_reference > "
      << "docs/config.md";
}

TEST(ConfigTest, SchemaInDocsIsUpToDate) {
  const std::string page = SYNCBN_SOURCE_DIR "/docs/train.schema.json";
  EXPECT_TRUE(base::read_file(page) == config_json_schema())
      << page << " is out of date; make it anew with: build/bin/train --print_schema > "
      << "docs/train.schema.json";
}

/// Prints a line for each YAML text: "ok", or the path of the first mistake.
constexpr const char* kValidate = R"(
import json, re, sys, jsonschema, yaml
schema = json.load(open(sys.argv[1]))
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)
for text in sys.argv[2:]:
    value = yaml.safe_load(re.sub(r"(\d)e-", r"\1.0e-", text))  # 1e-4 is a number in YAML 1.2 only
    errors = sorted(validator.iter_errors(value), key=lambda e: list(e.path))
    print(".".join(map(str, errors[0].path)) or "top" if errors else "ok")
)";

TEST(ConfigTest, SchemaTakesWhatTrainTakes) {
  SYNCBN_SKIP_UNLESS(test::python_has("jsonschema, yaml"), "python-torch");
  std::vector<std::pair<std::string, std::string>> texts = {
      {"{base: a.yaml, epochs: '${n}', loader: {num_workers: auto}, seed: null}", "ok"},
      {"{checkpoint: {every: 15min, keep_best: {count: 2}}, max_time: '11h'}", "ok"},
      {"{optimizer: {type: sgd, groups: [{match: bias, lr: 0.1x}]}}", "ok"},
      {"{optimizer: adamw, data: {type: image_folder, transforms: [random_horizontal_flip]}}",
       "ok"},
      {"{optimizer: {type: sgd, groups: [{match: '${m}', lr: '${lr}'}]}, sampler: '${s}'}", "ok"},
      {"{optimizer: {type: adamw, betas: [0.9, '${env:BETA}']}, data: {type: '${d}'}}", "ok"},
      {"{data: {type: image_folder, transforms: {'0': {type: resize, size: 9}, '1': {size: 8}}}}",
       "ok"},
      {"{data: {type: image_folder, transforms: {first: resize}}}", "data"},
      {"{loader: , ddp: null, checkpoint: {every: 2.ep}}", "ok"},
      {"{optimizer: {type: adamw, betas: [0.9, much]}}", "optimizer"},
      {"{checkpoint: {every: 0ep}}", "checkpoint"},
      {"{checkpoint: {every: 3}}", "checkpoint"},
      {"{base: 3}", "base"},
      {"{loader: {workers: 3}}", "loader"},
      {"{seed: 1.5}", "seed"},
      {"{epochs: ~/x}", "epochs"},
      {"{epoch: 3}", "top"},
      {"{epochs: 0}", "epochs"},
      {"{epochs: many}", "epochs"},
      {"{optimizer: {type: sgd, betas: [0.9, 0.99]}}", "optimizer"},
      {"{optimizer: adamww}", "optimizer"},
      {"{amp: bf17}", "amp"},
      {"{checkpoint: {every: often}}", "checkpoint"},
      {"{data: {type: image_folder, transforms: [flip]}}", "data"},
  };
  for (const auto& file : std::filesystem::directory_iterator(SYNCBN_SOURCE_DIR "/configs")) {
    texts.emplace_back(base::read_file(file.path()), "ok");
  }
  std::vector<std::string> program = {test::python(), "-c", kValidate,
                                      SYNCBN_SOURCE_DIR "/docs/train.schema.json"};
  std::string expected;
  for (const auto& [text, result] : texts) {
    program.push_back(text);
    expected += result + "\n";
  }
  const auto found = test::run_program(program);
  EXPECT_EQ(found.out, expected) << found.err;
}

TEST(ConfigTest, EveryKeyHasHelp) {
  for (const config::FieldInfo& field : config_fields()) {
    EXPECT_NE(field.help, "") << field.path;
  }
}

}  // namespace
}  // namespace syncbn::train
