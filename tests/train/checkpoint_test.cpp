#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/train/checkpoint.h>
#include <sys/resource.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Checkpoint example() {
  Checkpoint checkpoint;
  checkpoint.model["conv.weight"] = at::arange(6, at::kFloat).view({2, 3});
  checkpoint.model["bn.num_batches_tracked"] = at::scalar_tensor(7, at::kLong);
  checkpoint.optimizer["conv.weight"]["momentum_buffer"] = at::ones({2, 3});
  checkpoint.step = 12;
  checkpoint.sampler = {
      .seed = 4, .epoch = 2, .consumed = 96, .fingerprint = -5, .order = "shards"};
  checkpoint.epoch_loss = 1.25;
  checkpoint.epoch_samples = 96;
  checkpoint.world_size = 2;
  checkpoint.rng_states = {at::zeros({8}, at::kByte), at::ones({8}, at::kByte)};
  checkpoint.epoch_counts = {96, 90};
  checkpoint.ema["conv.weight"] = at::zeros({2, 3});
  checkpoint.scaler["scale"] = at::scalar_tensor(1024.0F);
  checkpoint.schedule["best"] = 0.25;
  checkpoint.lr_scale = 0.5;
  checkpoint.restores = 1;
  checkpoint.best = {{.value = 0.5, .loss = 2.5, .epoch = 1, .file = "best.pt"},
                     {.value = 0.25, .epoch = 2, .file = "best-000000000020.pt"}};
  checkpoint.stale_evaluations = 1;
  checkpoint.seconds = 3.5;
  checkpoint.epoch_line = R"({"epoch":2})";
  checkpoint.config = "epochs: 3\n";
  checkpoint.classes = {"cat", "dog"};
  return checkpoint;
}

std::string error_of(const std::string& bytes) {
  return test::message_of<base::UserError>([&] { parse_checkpoint(bytes, "last.pt"); });
}

TEST(CheckpointTest, KeepsEveryField) {
  const Checkpoint back = parse_checkpoint(serialize(example()), "last.pt");
  const Checkpoint wanted = example();
  ASSERT_EQ(back.model.size(), 2u);
  for (const auto& [name, tensor] : wanted.model) {
    EXPECT_TRUE(at::equal(back.model.at(name), tensor)) << name;
    EXPECT_EQ(back.model.at(name).dtype(), tensor.dtype());
  }
  EXPECT_TRUE(at::equal(back.optimizer.at("conv.weight").at("momentum_buffer"), at::ones({2, 3})));
  EXPECT_EQ(back.step, 12);
  EXPECT_EQ(back.sampler.seed, 4);
  EXPECT_EQ(back.sampler.epoch, 2);
  EXPECT_EQ(back.sampler.consumed, 96);
  EXPECT_EQ(back.sampler.fingerprint, -5);
  EXPECT_EQ(back.sampler.order, "shards");
  EXPECT_EQ(back.epoch_loss, 1.25);
  EXPECT_EQ(back.epoch_samples, 96);
  EXPECT_EQ(back.world_size, 2);
  ASSERT_EQ(back.rng_states.size(), 2u);
  EXPECT_TRUE(at::equal(back.rng_states[1], at::ones({8}, at::kByte)));
  EXPECT_EQ(back.epoch_counts, (std::vector<int64_t>{96, 90}));
  EXPECT_TRUE(at::equal(back.ema.at("conv.weight"), at::zeros({2, 3})));
  EXPECT_EQ(back.scaler.at("scale").item<float>(), 1024);
  EXPECT_EQ(back.schedule.at("best"), 0.25);
  EXPECT_EQ(back.lr_scale, 0.5);
  EXPECT_EQ(back.restores, 1);
  ASSERT_EQ(back.best.size(), 2U);
  EXPECT_EQ(back.best[0].loss, 2.5);
  EXPECT_EQ(back.best[1].loss, std::nullopt) << "as in checkpoints of older versions";
  EXPECT_EQ(back.best[1].value, 0.25);
  EXPECT_EQ(back.best[1].epoch, 2);
  EXPECT_EQ(back.best[1].file, "best-000000000020.pt");
  EXPECT_EQ(back.stale_evaluations, 1);
  EXPECT_TRUE(back.has_optimizer);
  EXPECT_EQ(back.seconds, 3.5);
  EXPECT_EQ(back.epoch_line, R"({"epoch":2})");
  EXPECT_EQ(back.config, "epochs: 3\n");
  EXPECT_EQ(back.classes, (std::vector<std::string>{"cat", "dog"}));
}

/// The run that resumes from it removes the files that are no longer among the best.
TEST(CheckpointTest, RefusesFilesThatAreNotItsRunsBest) {
  const auto naming = [](const std::string& file) {
    Checkpoint crafted = example();
    crafted.best[1].file = file;
    return serialize(crafted);
  };
  for (const char* file : {"best.pt", "best-000000000020.pt", "best-7.pt"}) {
    EXPECT_NO_THROW(parse_checkpoint(naming(file), "last.pt")) << file;
  }
  for (const char* file : {"../../precious", "/home/u/precious", "../best-7.pt", "a/best-7.pt", "",
                           ".", "last.pt", "log.jsonl", "best-.pt", "best-x.pt", "best-7.pt/"}) {
    EXPECT_THAT(error_of(naming(file)),
                AllOf(HasSubstr(fmt::format("last.pt names '{}' among", file)),
                      HasSubstr("set init=last.pt")));
  }
}

TEST(CheckpointTest, ReadsSamplerStateOfTheVersionWithoutAnOrder) {
  Checkpoint old = example();
  old.sampler.version = 1;
  const Checkpoint back = parse_checkpoint(serialize(old), "last.pt");
  EXPECT_EQ(back.sampler.version, 1);
  EXPECT_EQ(back.sampler.consumed, 96);
  EXPECT_EQ(back.sampler.order, "");
}

TEST(CheckpointTest, WritesAViewWithoutTheStorageAroundIt) {
  Checkpoint checkpoint = example();
  const size_t small = serialize(checkpoint).size();
  checkpoint.model["conv.weight"] = at::zeros({1000, 1000}).slice(0, 0, 2).slice(1, 0, 3);
  EXPECT_LT(serialize(checkpoint).size(), small + 1000);
}

TEST(CheckpointTest, WritesTheSameBytesToAFile) {
  const test::TempFolder folder;
  write_checkpoint(example(), folder / "last.pt");
  EXPECT_EQ(base::read_file(folder / "last.pt"), serialize(example()));
}

TEST(CheckpointTest, IsNotWrittenInPartWhereTheDiskIsFull) {
  // Instead of a full disk, a limit on file sizes: /dev/full cannot be replaced by a rename.
  const test::TempFolder folder;
  write_checkpoint(example(), folder / "last.pt");
  const std::string before = base::read_file(folder / "last.pt");
  Checkpoint large = example();
  large.model["large"] = at::zeros({1 << 20});
  rlimit former{};
  ::getrlimit(RLIMIT_FSIZE, &former);
  const rlimit small{.rlim_cur = 1 << 20, .rlim_max = former.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_THROW(write_checkpoint(large, folder / "last.pt"), base::UnavailableError);
  ::setrlimit(RLIMIT_FSIZE, &former);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(base::read_file(folder / "last.pt"), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(CheckpointTest, ACopyOnTheHostDoesNotChangeWithTheOriginal) {
  const Checkpoint original = example();
  const Checkpoint copy = copy_to_host(original);
  original.model.at("conv.weight").zero_();
  original.optimizer.at("conv.weight").at("momentum_buffer").zero_();
  EXPECT_EQ(serialize(copy), serialize(example()));
}

TEST(CheckpointTest, ANetworkAloneHasNoOptimizer) {
  Checkpoint checkpoint = example();
  checkpoint.has_optimizer = false;
  const Checkpoint back = parse_checkpoint(serialize(checkpoint), "best.pt");
  EXPECT_FALSE(back.has_optimizer);
  EXPECT_TRUE(back.optimizer.empty());
}

TEST(CheckpointTest, RefusesAFileThatIsCutOffAnywhere) {
  const std::string whole = serialize(example());
  for (const double part : {0.0, 0.1, 0.5, 0.9, 0.999}) {
    const auto length = static_cast<size_t>(part * static_cast<double>(whole.size()));
    EXPECT_THAT(error_of(whole.substr(0, length)), HasSubstr("last.pt is not a whole checkpoint"))
        << part;
  }
}

TEST(CheckpointTest, RefusesAFileInWhichAnyByteChanged) {
  const std::string whole = serialize(example());
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] ^= 1;
    ASSERT_THAT(error_of(damaged), HasSubstr("last.pt is not a whole checkpoint")) << "byte " << at;
  }
}

TEST(CheckpointTest, RefusesFilesOfOtherPrograms) {
  EXPECT_THAT(error_of("not an archive"), HasSubstr("is not a whole checkpoint"));
  EXPECT_THAT(error_of("version https://git-lfs.github.com/spec/v1"),
              HasSubstr("is not a whole checkpoint of train (42 B): it is a pointer of Git LFS"));
  EXPECT_THAT(error_of("PK\3\4 cut short"), HasSubstr("it is damaged, truncated"));
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("weight", at::ones({2}));
  const std::vector<char> foreign = torch::jit::pickle_save(dict);
  EXPECT_THAT(error_of({foreign.begin(), foreign.end()}), HasSubstr("is not a whole checkpoint"));
}

TEST(CheckpointTest, TellsFilesOfPythonFromDamagedOnes) {
  // The archive as torch.save writes it, without a comment.
  std::string archive = serialize(example());
  archive.resize(archive.size() - std::string("syncbn crc32 00000000").size());
  archive[archive.size() - 2] = 0;
  for (const std::string& bytes : {archive, std::string("\x80\x02}q\x01.")}) {
    EXPECT_THAT(error_of(bytes),
                HasSubstr("it is of Python's torch.save; to begin with its weights, set init="));
  }
  EXPECT_THAT(error_of(archive.substr(0, 1000)), HasSubstr("it is damaged, truncated or"));
}

TEST(CheckpointTest, IsReadByPythonWithWeightsOnly) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const test::TempFolder folder;
  const std::string path = folder / "last.pt";
  base::write_file_atomically(path, serialize(example()));
  const auto result = test::run_program({test::python(), "-c", R"(
import sys, torch, zipfile
assert zipfile.ZipFile(sys.argv[1]).testzip() is None
c = torch.load(sys.argv[1], weights_only=True)
assert c["format"] == "syncbn-checkpoint" and c["format_version"] == 1, c
assert c["model"]["conv.weight"].tolist() == [[0, 1, 2], [3, 4, 5]], c["model"]
assert c["model"]["bn.num_batches_tracked"].dtype == torch.int64
assert c["sampler"]["consumed"] == 96 and c["epoch_loss"] == 1.25
assert len(c["rng_states"]) == 2
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Linear(3, 2, bias=False)
        self.bn = torch.nn.Module()
        self.bn.register_buffer("num_batches_tracked", torch.tensor(0))
Net().load_state_dict(c["model"], strict=True)
print("read")
)",
                                         path});
  EXPECT_EQ(result.out, "read\n") << result.err;
}

}  // namespace
}  // namespace syncbn::train
