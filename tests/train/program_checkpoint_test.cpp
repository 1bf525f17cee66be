#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/train/checkpoint.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <algorithm>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

torch::nn::Sequential network(int64_t width = 4) {
  return torch::nn::Sequential(torch::nn::Linear(3, width), torch::nn::BatchNorm1d(width));
}

void step(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, int64_t seed) {
  at::manual_seed(static_cast<uint64_t>(seed));
  optimizer.zero_grad();
  net->forward(at::randn({5, 3})).square().sum().backward();
  optimizer.step();
}

TEST(ProgramCheckpointTest, AProgramGoesOnWithTheSameBits) {
  const test::TempFolder folder;
  auto whole = network();
  torch::optim::Adam whole_optimizer(whole->parameters(), 0.1);
  for (int64_t i = 0; i < 3; ++i) step(whole, whole_optimizer, i);
  save_checkpoint(folder / "a.pt", *whole, &whole_optimizer,
                  {{"epoch", 7},
                   {"name", "x"},
                   {"best", 0.5},
                   {"scale", at::ones({2})},
                   {"losses", std::vector<double>{2, 1}},
                   {"pair", std::tuple<int64_t, bool>(3, true)}});

  auto part = network();
  torch::optim::Adam part_optimizer(part->parameters(), 0.1);
  const Extra extra = load_checkpoint(folder / "a.pt", *part, &part_optimizer);
  EXPECT_EQ(extra.at("epoch").toInt(), 7);
  EXPECT_EQ(extra.at("name").toStringRef(), "x");
  EXPECT_EQ(extra.at("best").toDouble(), 0.5);
  EXPECT_TRUE(at::equal(extra.at("scale").toTensor(), at::ones({2})));
  EXPECT_EQ(extra.at("losses").toDoubleVector(), (std::vector<double>{2, 1}));
  EXPECT_EQ(extra.at("pair").toTupleRef().elements()[0].toInt(), 3);
  for (int64_t i = 3; i < 6; ++i) step(whole, whole_optimizer, i), step(part, part_optimizer, i);
  for (size_t i = 0; i < whole->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(whole->parameters()[i], part->parameters()[i]));
  }
  EXPECT_TRUE(at::equal(whole->buffers()[0], part->buffers()[0]));
}

TEST(ProgramCheckpointTest, RefusesATensorThatReachesBeyondItsData) {
  const test::TempFolder folder;
  auto net = network();
  torch::optim::Adam optimizer({at::ones({109}, at::requires_grad())}, 0.1);
  optimizer.param_groups()[0].params()[0].mutable_grad() = at::ones({109});
  optimizer.step();
  save_checkpoint(folder / "a.pt", *net, &optimizer, {{"scale", at::ones({113})}});
  std::string bytes = base::read_file(folder / "a.pt");
  constexpr size_t kDigits = 8;
  bytes.resize(bytes.size() - kDigits);
  const auto find_sizes = [&](const char* tuple) {
    const size_t place = bytes.find(tuple);
    EXPECT_NE(place, bytes.npos);
    return std::min(place, bytes.size() - 3);
  };
  const size_t place = find_sizes("(K\x71t");  // the tuple (113,) in a pickle
  const size_t optimizer_place = find_sizes("(K\x6dt");
  const auto load = [&] {
    uint32_t crc = ~0U;
    for (const char byte : bytes) {
      crc ^= static_cast<uint8_t>(byte);
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320 : 0);
    }
    base::write_file_atomically(folder / "a.pt", bytes + fmt::format("{:08x}", ~crc));
    load_checkpoint(folder / "a.pt", *net, &optimizer);
  };
  EXPECT_NO_THROW(load());
  bytes[optimizer_place + 2] = 127;
  EXPECT_THAT(load, ThrowsMessage<base::UserError>(
                        HasSubstr("a.pt: it has a tensor that reaches beyond its data")));
  bytes[optimizer_place + 2] = 109;
  bytes[place + 2] = 127;
  EXPECT_THAT(load, ThrowsMessage<base::UserError>(HasSubstr("it is damaged, truncated or")));
}

TEST(ProgramCheckpointTest, ReadsTheNetworkOfARunOfTrain) {
  const test::TempFolder folder;
  auto saved = network();
  Checkpoint run;
  for (const auto& item : saved->named_parameters()) run.model[item.key()] = item.value();
  for (const auto& item : saved->named_buffers()) run.model[item.key()] = item.value();
  write_checkpoint(run, folder / "best.pt");
  auto net = network();
  EXPECT_TRUE(load_checkpoint(folder / "best.pt", *net).empty());
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(net->parameters()[i], saved->parameters()[i]));
  }
  torch::optim::Adam optimizer(net->parameters(), 0.1);
  EXPECT_THAT([&] { load_checkpoint(folder / "best.pt", *net, &optimizer); },
              ThrowsMessage<base::UserError>(HasSubstr("of a run of train is for train alone")));
}

TEST(ProgramCheckpointTest, SaysWhatDoesNotFit) {
  const test::TempFolder folder;
  auto net = network();
  save_checkpoint(folder / "a.pt", *net);
  torch::optim::Adam optimizer(net->parameters(), 0.1);
  const auto error = [&](torch::nn::Module& module, torch::optim::Optimizer* with = nullptr) {
    return test::message_of<base::UserError>(
        [&] { load_checkpoint(folder / "a.pt", module, with); });
  };
  EXPECT_THAT(error(*network(5)), HasSubstr("its tensor '0.bias' has another shape"));
  EXPECT_THAT(error(*torch::nn::Sequential(torch::nn::Linear(3, 4))),
              HasSubstr("it has 7 tensors, the module 2"));
  EXPECT_THAT(error(*net, &optimizer), HasSubstr("it was saved without an optimizer"));
  std::string bytes = base::read_file(folder / "a.pt");
  bytes[bytes.size() / 2] ^= 1;
  base::write_file_atomically(folder / "a.pt", bytes);
  EXPECT_THAT(error(*net), HasSubstr("is not a whole file of save_checkpoint()"));
}

TEST(ProgramCheckpointTest, IsReadByPythonWithWeightsOnly) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const test::TempFolder folder;
  auto net = network();
  torch::optim::Adam optimizer(net->parameters(), 0.1);
  step(net, optimizer, 0);
  save_checkpoint(folder / "a.pt", *net, &optimizer, {{"epoch", 7}});
  const auto result = test::run_program({test::python(), "-c", R"(
import sys, torch
c = torch.load(sys.argv[1], weights_only=True)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
net.load_state_dict(c["model"], strict=True)
assert c["optimizer"].dtype == torch.uint8
print(c["extra"]["epoch"])
)",
                                         folder / "a.pt"});
  EXPECT_EQ(result.out, "7\n") << result.err;
}

}  // namespace
}  // namespace syncbn::train
