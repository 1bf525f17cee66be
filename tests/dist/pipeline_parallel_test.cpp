// PipelineParallel: several stages in one process on the CPU, and stages on ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/pipeline_parallel.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "dist/group.h"
#include "dist/tensors.h"
#include "dist/training.h"
#include "pipeline/schedule.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::PipelineOptions;
using dist::PipelineParallel;
using dist::PipelineSchedule;
using dist::PipelineStage;
using dist::PipelineStatistics;
using dist::StageError;
using dist::detail::PipelineAction;
using dist::detail::PipelineActions;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::expect_same_state;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::run_group_and_collect;
using syncbn::test::sgd_step;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Tensors = std::vector<at::Tensor>;
using Kind = PipelineAction::Kind;

constexpr PipelineSchedule kSchedules[] = {PipelineSchedule::kGpipe, PipelineSchedule::k1f1b};

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// The layers of one, two or three stages.
nn::Sequential make_layers(int first, int last, bool batch_norm = false) {
  nn::Sequential layers;
  for (int i = first; i < last; ++i) {
    at::manual_seed(static_cast<uint64_t>(i));
    layers->push_back(nn::Linear(4, 4));
    if (batch_norm) layers->push_back(nn::BatchNorm1d(4));
    layers->push_back(nn::Functional(at::tanh));
  }
  layers->to(at::kDouble);
  return layers;
}

/// A network as a whole, and its layers divided into stages.
struct Split {
  explicit Split(int stages, bool batch_norm = false) {
    for (int i = 0; i < stages; ++i) {
      whole.push_back(make_layers(2 * i, 2 * i + 2, batch_norm));
      parts.push_back(make_layers(2 * i, 2 * i + 2, batch_norm));
    }
  }

  std::vector<PipelineStage> stages() const { return {parts.begin(), parts.end()}; }

  at::Tensor whole_forward(at::Tensor values) {
    for (nn::Sequential& part : whole) values = part->forward(values);
    return values;
  }
  double whole_step(const at::Tensor& input, const at::Tensor& target) {
    const at::Tensor loss = loss_of(whole_forward(input), target);
    loss.backward();
    return loss.item<double>();
  }

  void expect_same() {
    for (size_t i = 0; i < parts.size(); ++i) {
      SCOPED_TRACE(i);
      expect_same_state(*parts[i], *whole[i], 1e-12);
    }
  }

  std::vector<nn::Sequential> whole, parts;
};

struct Data {
  explicit Data(int64_t samples, uint64_t seed = 7) {
    at::manual_seed(seed);
    input = at::randn({samples, 4}, at::kDouble);
    target = at::randn({samples, 4}, at::kDouble);
  }
  Data part(int64_t index, int64_t count) const {
    Data one(1);
    one.input = input.tensor_split(count)[static_cast<size_t>(index)];
    one.target = target.tensor_split(count)[static_cast<size_t>(index)];
    return one;
  }
  at::Tensor input, target;
};

// Schedules

TEST(PipelineScheduleTest, OneForwardOneBackwardIsInOrder) {
  const auto forward = [](int64_t i, std::optional<int64_t> expects_gradients_of = std::nullopt) {
    return PipelineAction{
        .kind = Kind::kForward, .first = i, .expects_gradients_of = expects_gradients_of};
  };
  const auto backward = [](int64_t i) {
    return PipelineAction{.kind = Kind::kBackward, .first = i};
  };
  using dist::detail::one_forward_one_backward_actions;
  EXPECT_THAT(
      one_forward_one_backward_actions(3, 0, 3),
      ElementsAre(forward(0), forward(1), forward(2, 0), backward(0), backward(1), backward(2)));
  EXPECT_THAT(
      one_forward_one_backward_actions(3, 1, 3),
      ElementsAre(forward(0), forward(1, 0), backward(0), forward(2, 1), backward(1), backward(2)));
  EXPECT_THAT(
      one_forward_one_backward_actions(3, 2, 3),
      ElementsAre(forward(0), backward(0), forward(1), backward(1), forward(2), backward(2)));
}

/// The transfers between two stages in the order in which the front or the back stage starts them.
std::vector<std::string> transfers(const PipelineActions& actions, bool is_front) {
  std::vector<std::string> all;
  std::vector<bool> asked(16);
  const auto gradients = [&](int64_t i) {
    if (!asked[static_cast<size_t>(i)]) all.push_back("B" + std::to_string(i));
    asked[static_cast<size_t>(i)] = true;
  };
  for (const PipelineAction& action : actions) {
    if (action.kind == Kind::kBackward) {
      gradients(action.first);
      continue;
    }
    if (is_front && action.expects_gradients_of) gradients(*action.expects_gradients_of);
    all.push_back("F" + std::to_string(action.first));
  }
  return all;
}

TEST(PipelineScheduleTest, NeighboursStartTheirTransfersInOneOrder) {
  using dist::detail::one_forward_one_backward_actions;
  for (int stages = 2; stages <= 5; ++stages) {
    for (int64_t count = 1; count <= 8; ++count) {
      for (int stage = 0; stage + 1 < stages; ++stage) {
        EXPECT_EQ(transfers(one_forward_one_backward_actions(count, stage, stages), true),
                  transfers(one_forward_one_backward_actions(count, stage + 1, stages), false))
            << stage << " of " << stages << ", " << count;
      }
    }
  }
}

// In one process

TEST(PipelineParallelTest, StepsAreThoseOfTheWholeNetwork) {
  for (const PipelineSchedule schedule : kSchedules) {
    for (const int stages : {1, 2, 3}) {
      for (const int64_t micro_batches : {1, 2, 4, 7}) {
        SCOPED_TRACE(::testing::Message() << stages << " stages, " << micro_batches);
        Split net(stages);
        PipelineParallel pipeline(net.stages(),
                                  {.micro_batches = micro_batches, .schedule = schedule});
        for (uint64_t step = 0; step < 3; ++step) {
          const Data data(7 + static_cast<int64_t>(step), step);
          const double expected = net.whole_step(data.input, data.target);
          EXPECT_NEAR(pipeline.step(data.input, data.target, loss_of), expected, 1e-12);
          net.expect_same();
          for (const auto& part : net.whole) sgd_step(*part);
          for (const auto& part : net.parts) sgd_step(*part);
        }
        const Data data(9);
        const at::Tensor output = pipeline.forward(data.input);
        EXPECT_TRUE(close(output, net.whole_forward(data.input), 1e-12, 1e-12));
        EXPECT_FALSE(output.requires_grad());
      }
    }
  }
}

TEST(PipelineParallelTest, GradientsAndSummedLossesAddUp) {
  Split net(2);
  PipelineParallel pipeline(net.stages(), {.micro_batches = 3, .average_losses = false});
  const auto sum_loss = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).pow(2).sum();
  };
  const Data data(8);
  for (int i = 0; i < 2; ++i) {  // without zero_grad()
    const at::Tensor expected = sum_loss(net.whole_forward(data.input), data.target);
    expected.backward();
    EXPECT_NEAR(pipeline.step(data.input, data.target, sum_loss), expected.item<double>(), 1e-12);
  }
  net.expect_same();
}

/// Counts its results that are still alive, and records the order of its calls.
struct CountingImpl : nn::Module {
  explicit CountingImpl(int index) : index(index) {}

  at::Tensor forward(const at::Tensor& input) {
    auto* const values = new at::Tensor(input.detach().clone());
    const int now = ++*alive;
    most = std::max(most, now);
    const at::Tensor counted = at::from_blob(
        values->mutable_data_ptr(), values->sizes(),
        [values, alive = alive](void*) {
          delete values;
          --*alive;
        },
        values->options());
    record("F");
    const at::Tensor output = input * counted;  // its graph keeps `counted` alive
    output.register_hook([this](const at::Tensor&) { record("B"); });
    return output;
  }
  void record(const std::string& what) { calls.push_back(what); }

  const int index;
  std::shared_ptr<std::atomic<int>> alive = std::make_shared<std::atomic<int>>(0);
  int most = 0;
  std::vector<std::string> calls;
};
TORCH_MODULE(Counting);

TEST(PipelineParallelTest, ActivationsInMemoryDependOnTheSchedule) {
  for (const PipelineSchedule schedule : kSchedules) {
    const bool early = schedule == PipelineSchedule::k1f1b;
    std::vector<Counting> counting;
    std::vector<PipelineStage> stages;
    for (int i = 0; i < 3; ++i) {
      counting.emplace_back(i);
      nn::Sequential stage(nn::Linear(4, 4), counting.back());
      stage->to(at::kDouble);
      stages.emplace_back(stage);
    }
    PipelineParallel pipeline(stages, {.micro_batches = 6, .schedule = schedule});
    const Data data(12);
    pipeline.step(data.input, data.target, loss_of);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(counting[static_cast<size_t>(i)]->most, early ? 3 - i : 6) << i;
      EXPECT_EQ(*counting[static_cast<size_t>(i)]->alive, 0) << i;
    }
    const auto& last = counting[2]->calls;
    using Calls = std::vector<std::string>;
    EXPECT_EQ(Calls(last.begin(), last.begin() + 4),
              early ? Calls({"F", "B", "F", "B"}) : Calls({"F", "F", "F", "F"}));
  }
}

TEST(PipelineParallelTest, MicroBatchesComeInOrder) {
  for (const PipelineSchedule schedule : kSchedules) {
    std::vector<double> seen;
    Split net(2);
    PipelineParallel pipeline(net.stages(), {.micro_batches = 4, .schedule = schedule});
    const Data data(8);
    pipeline.step(data.input, data.target, [&](const at::Tensor& output, const at::Tensor& target) {
      seen.push_back(target[0][0].item<double>());
      return loss_of(output, target);
    });
    std::vector<double> expected;
    for (int64_t i = 0; i < 8; i += 2) expected.push_back(data.target[i][0].item<double>());
    EXPECT_EQ(seen, expected);
  }
}

/// Returns several tensors, one of them of integers.
struct FrontImpl : nn::Module {
  FrontImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  using Output = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
  Output forward(const at::Tensor& input) {
    return {linear(input), input, (input.select(1, 0) > 0).to(at::kLong)};
  }
  nn::Linear linear{nullptr};
};
struct BackImpl : nn::Module {
  BackImpl() {
    linear = register_module("linear", nn::Linear(4, 4));
    embedding = register_module("embedding", nn::Embedding(2, 4));
  }
  at::Tensor forward(const Tensors& inputs) {
    return linear(at::relu(inputs[0]) + inputs[1]) + embedding(inputs[2]);
  }
  nn::Linear linear{nullptr};
  nn::Embedding embedding{nullptr};
};

TEST(PipelineParallelTest, StagesMayPassSeveralTensors) {
  for (const PipelineSchedule schedule : kSchedules) {
    const auto make = [] {
      at::manual_seed(1);
      auto pair = std::make_pair(std::make_shared<FrontImpl>(), std::make_shared<BackImpl>());
      pair.first->to(at::kDouble);
      pair.second->to(at::kDouble);
      return pair;
    };
    const auto [front, back] = make();
    const auto [whole_front, whole_back] = make();
    PipelineParallel pipeline({{front, at::kCPU}, {back, at::kCPU}},
                              {.micro_batches = 3, .schedule = schedule});
    const Data data(8);
    const auto [values, skipped, indices] = whole_front->forward(data.input);
    const at::Tensor expected =
        loss_of(whole_back->forward({values, skipped, indices}), data.target);
    expected.backward();
    EXPECT_NEAR(pipeline.step(data.input, data.target, loss_of), expected.item<double>(), 1e-12);
    expect_same_state(*front, *whole_front, 1e-12);
    expect_same_state(*back, *whole_back, 1e-12);
  }
}

TEST(PipelineParallelTest, FrozenStagesGetNoGradients) {
  for (const int frozen : {0, 1, 2}) {
    SCOPED_TRACE(frozen);
    Split net(3);
    for (const auto& item : net.parts[static_cast<size_t>(frozen)]->parameters()) {
      item.set_requires_grad(false);
    }
    for (const auto& item : net.whole[static_cast<size_t>(frozen)]->parameters()) {
      item.set_requires_grad(false);
    }
    PipelineParallel pipeline(net.stages(), {.micro_batches = 2});
    const Data data(4);
    net.whole_step(data.input, data.target);
    pipeline.step(data.input, data.target, loss_of);
    net.expect_same();
  }
}

TEST(PipelineParallelTest, BatchNormTakesStatisticsOverMicroBatchesOrTheBatch) {
  Split net(2, /*batch_norm=*/true);
  PipelineParallel pipeline(net.stages(),
                            {.micro_batches = 3, .statistics = PipelineStatistics::kBatch});
  for (const int64_t samples : {8, 3}) {
    const Data data(samples);
    const double expected = net.whole_step(data.input, data.target);
    EXPECT_NEAR(pipeline.step(data.input, data.target, loss_of), expected, 1e-12);
    net.expect_same();
  }

  Split other(2, /*batch_norm=*/true);
  PipelineParallel by_micro_batch(other.stages(), {.micro_batches = 2});
  const Data data(8);
  double expected = 0;
  for (int i = 0; i < 2; ++i) {
    const Data half = data.part(i, 2);
    const at::Tensor loss = loss_of(other.whole_forward(half.input), half.target) / 2;
    loss.backward();
    expected += loss.item<double>();
  }
  EXPECT_NEAR(by_micro_batch.step(data.input, data.target, loss_of), expected, 1e-12);
  other.expect_same();
}

TEST(PipelineParallelTest, StagesComputeWithTheCallersModesAndAShareOfItsThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  std::atomic<int> threads = 0;
  nn::Sequential stage(nn::Linear(4, 4), nn::Functional([&](const at::Tensor& input) {
                         threads = at::get_num_threads();
                         return input;
                       }));
  stage->to(at::kDouble);
  PipelineParallel pipeline({stage, make_layers(0, 1)});
  EXPECT_EQ(at::get_num_threads(), 4);
  const Data data(4);
  const at::NoGradGuard no_grad;  // step() builds graphs nevertheless
  pipeline.step(data.input, data.target, loss_of);
  EXPECT_TRUE(stage->parameters()[0].grad().defined());
  EXPECT_EQ(threads, 2);
  at::set_num_threads(before);
}

/// Throws in forward or backward if the input begins with a given number.
struct ThrowingImpl : nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    if (in_forward) throw std::runtime_error("no luck");
    at::Tensor output = input * 2;
    if (in_backward && output.requires_grad()) {
      output.register_hook([](const at::Tensor&) { throw std::runtime_error("no luck"); });
    }
    return output;
  }
  bool in_forward = false, in_backward = false;
};

TEST(PipelineParallelTest, AStageThatThrowsEndsAllWithItsName) {
  for (const PipelineSchedule schedule : kSchedules) {
    for (const int failing : {0, 1, 2}) {
      for (const bool in_forward : {true, false}) {
        SCOPED_TRACE(::testing::Message() << failing << in_forward);
        Split net(3);
        const auto throwing = std::make_shared<ThrowingImpl>();
        net.parts[static_cast<size_t>(failing)]->push_back(throwing);
        PipelineParallel pipeline(net.stages(), {.micro_batches = 4, .schedule = schedule});
        const Data data(8);
        (in_forward ? throwing->in_forward : throwing->in_backward) = true;
        const std::string message =
            message_of<StageError>([&] { pipeline.step(data.input, data.target, loss_of); });
        EXPECT_THAT(message, AllOf(HasSubstr("PipelineParallel: stage " + std::to_string(failing)),
                                   HasSubstr("SequentialImpl"),
                                   HasSubstr(in_forward ? "in the forward of micro-batch 0"
                                                        : "in the backward of micro-batch 0"),
                                   HasSubstr("no luck")));
        throwing->in_forward = throwing->in_backward = false;
        EXPECT_NO_THROW(pipeline.step(data.input, data.target, loss_of));
      }
    }
  }
}

TEST(PipelineParallelTest, StagesThatDoNotFitAreBothNamed) {
  const auto wide = std::make_shared<FrontImpl>();
  nn::Linear narrow(5, 4);
  PipelineParallel shapes({nn::Linear(4, 3), narrow});
  const at::Tensor input = at::rand({4, 4});
  EXPECT_THAT(message_of<StageError>([&] { shapes.step(input, input, loss_of); }),
              AllOf(HasSubstr("stage 1 (torch::nn::LinearImpl)"), HasSubstr("[4, 3] Float"),
                    HasSubstr("from stage 0 (torch::nn::LinearImpl)"),
                    HasSubstr("mat1 and mat2 shapes cannot be multiplied")));
  PipelineParallel several({{wide}, {nn::Linear(4, 4)}});
  EXPECT_THAT(message_of<StageError>([&] { several.step(input, input, loss_of); }),
              HasSubstr("its forward takes one tensor, not 3"));
  PipelineParallel last({{nn::Linear(4, 4)}, {wide}});
  EXPECT_THAT(message_of<StageError>([&] { last.step(input, input, loss_of); }),
              HasSubstr("the last stage returned 3 tensors; it must return one"));
}

TEST(PipelineParallelTest, AStageThatPassesNoGradientIsNamed) {
  for (const int detaching : {1, 2}) {
    Split net(3);
    net.parts[static_cast<size_t>(detaching)]->push_back(
        nn::Functional([](const at::Tensor& input) { return input.detach(); }));
    PipelineParallel pipeline(net.stages(), {.micro_batches = 2});
    const Data data(4);
    EXPECT_THAT(message_of<StageError>([&] { pipeline.step(data.input, data.target, loss_of); }),
                AllOf(HasSubstr("PipelineParallel: stage " + std::to_string(detaching)),
                      HasSubstr("its outputs require no gradient"), HasSubstr("detach()")));
    EXPECT_NO_THROW(pipeline.forward(data.input));
  }
  Split frozen(2);
  for (const auto& part : frozen.parts) {
    for (const auto& item : part->parameters()) item.set_requires_grad(false);
  }
  PipelineParallel pipeline(frozen.stages());
  const Data data(4);
  EXPECT_THAT(message_of<StageError>([&] { pipeline.step(data.input, data.target, loss_of); }),
              HasSubstr("the loss requires no gradient"));
}

TEST(PipelineParallelTest, TheOutputOfForwardMustHaveSamples) {
  nn::Sequential last(nn::Functional([](const at::Tensor& input) { return input.sum(); }));
  PipelineParallel pipeline({nn::Linear(4, 4), last}, {.micro_batches = 2});
  EXPECT_THAT(message_of<StageError>([&] {
                pipeline.forward(at::rand({4, 4}));
              }),
              AllOf(HasSubstr("stage 1"), HasSubstr("the last stage returned a scalar")));
}

TEST(PipelineParallelTest, AMovedFromPipelineIsRefused) {
  PipelineParallel pipeline({nn::Linear(4, 4)});
  const PipelineParallel other = std::move(pipeline);
  EXPECT_THAT(message_of<UserError>([&] {
                pipeline.forward(at::rand({4, 4}));
              }),  // NOLINT
              HasSubstr("was moved from"));
}

struct OnMetaImpl : nn::Module {
  OnMetaImpl() { register_parameter("weight", at::ones({1}, at::kMeta)); }
  at::Tensor forward(const at::Tensor& input) { return input; }
};

TEST(PipelineParallelTest, RefusesWhatCannotWork) {
  const nn::Linear linear(4, 4);
  const at::Tensor input = at::rand({4, 4});
  EXPECT_THAT(message_of<UserError>([] { PipelineParallel(std::vector<PipelineStage>{}); }),
              HasSubstr("no stages are given"));
  EXPECT_THAT(message_of<UserError>([&] {
                PipelineParallel({linear, PipelineStage(std::shared_ptr<nn::LinearImpl>())});
              }),
              HasSubstr("stage 1 is null"));
  EXPECT_THAT(message_of<UserError>([&] { PipelineParallel({linear}, {.micro_batches = 0}); }),
              HasSubstr("micro_batches must be 1 or more, got 0"));
  EXPECT_THAT(message_of<UserError>(
                  [&] { PipelineParallel({PipelineStage(linear, at::Device(at::kCUDA, 99))}); }),
              HasSubstr("there is no device cuda:99 here"));
  EXPECT_THAT(message_of<UserError>([&] {
                PipelineParallel({linear}, {.schedule = PipelineSchedule::k1f1b,
                                            .statistics = PipelineStatistics::kBatch});
              }),
              HasSubstr("use the schedule gpipe"));
  const auto elsewhere = std::make_shared<OnMetaImpl>();
  EXPECT_THAT(
      message_of<UserError>([&] { PipelineParallel({elsewhere}); }),
      AllOf(HasSubstr("OnMetaImpl) is on cpu, but its 'weight' is on meta"), HasSubstr("to()")));

  PipelineParallel pipeline({linear, linear}, {.micro_batches = 5});
  EXPECT_THAT(message_of<UserError>([&] { pipeline.step(input, input, loss_of); }),
              HasSubstr("the input [4, 4] has 4 samples, fewer than micro_batches (5)"));
  EXPECT_THAT(message_of<UserError>([&] {
                pipeline.step(at::rand({6, 4}), {}, loss_of);
              }),
              HasSubstr("the target is undefined"));
  EXPECT_THAT(message_of<UserError>([&] {
                pipeline.step(at::rand({6, 4}), at::rand({7, 4}), loss_of);
              }),
              HasSubstr("differ in the number of samples"));
  EXPECT_THAT(message_of<UserError>([&] {
                pipeline.step(at::rand({6, 4}), at::rand({6, 4}), nullptr);
              }),
              HasSubstr("the loss is empty"));
  const at::Tensor ten = at::rand({10, 4});
  EXPECT_THAT(message_of<StageError>([&] {
                pipeline.step(ten, ten,
                              [](const at::Tensor& output, const at::Tensor&) { return output; });
              }),
              HasSubstr("the loss must be one number, got [2, 4]"));
}

TEST(PipelineParallelTest, TheLossMustDependOnTheOutput) {
  Split net(2);
  PipelineParallel pipeline(net.stages(), {.micro_batches = 2});
  const Data data(4);
  EXPECT_THAT(message_of<StageError>([&] {
                pipeline.step(data.input, data.target,
                              [](const at::Tensor& output, const at::Tensor&) {
                                return output.detach().sum();
                              });
              }),
              HasSubstr("the loss does not depend on the output"));
}

struct ScalarTooImpl : nn::Module {
  ScalarTooImpl() { norm = register_module("norm", nn::BatchNorm1d(4)); }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& input) {
    return {norm(input), input.sum()};
  }
  nn::BatchNorm1d norm{nullptr};
};

TEST(PipelineParallelTest, StatisticsOverTheBatchNeedOutputsOfSamples) {
  const auto first = std::make_shared<ScalarTooImpl>();
  PipelineParallel pipeline({{first}, {std::make_shared<BackImpl>()}},
                            {.micro_batches = 2, .statistics = PipelineStatistics::kBatch});
  const at::Tensor input = at::rand({4, 4});
  EXPECT_THAT(
      message_of<StageError>([&] { pipeline.step(input, input, loss_of); }),
      AllOf(HasSubstr("the first dimension of each output must be the samples, which are 4"),
            HasSubstr("got []")));
}

// Across ranks

PipelineParallel pipeline_of(const Split& net, int rank, const PipelineOptions& options) {
  return PipelineParallel::across_ranks(net.parts[static_cast<size_t>(rank)], options);
}

TEST(PipelineRanksTest, StepsAreThoseOfTheWholeNetwork) {
  run_group(3, [](int rank) {
    for (const PipelineSchedule schedule : kSchedules) {
      for (const int64_t micro_batches : {1, 4}) {
        Split net(3);
        auto pipeline =
            pipeline_of(net, rank, {.micro_batches = micro_batches, .schedule = schedule});
        for (uint64_t step = 0; step < 3; ++step) {
          const Data data(6 + static_cast<int64_t>(step), step);
          const double expected = net.whole_step(data.input, data.target);
          const double loss = pipeline.step(rank == 0 ? data.input : at::Tensor(),
                                            rank == 2 ? data.target : at::Tensor(), loss_of);
          EXPECT_NEAR(loss, expected, 1e-12);
          const auto& own = net.parts[static_cast<size_t>(rank)];
          expect_same_state(*own, *net.whole[static_cast<size_t>(rank)], 1e-12);
          for (const auto& part : net.whole) sgd_step(*part);
          sgd_step(*own);
        }
        const Data data(9);
        const at::Tensor output = pipeline.forward(data.input);
        EXPECT_EQ(output.defined(), rank == 2);
        if (rank == 2) {
          EXPECT_TRUE(close(output, net.whole_forward(data.input), 1e-12, 1e-12));
        }
      }
    }
  });
}

TEST(PipelineRanksTest, StagesMayPassSeveralTensors) {
  run_group(2, [](int rank) {
    at::manual_seed(1);
    const auto front = std::make_shared<FrontImpl>();
    const auto back = std::make_shared<BackImpl>();
    front->to(at::kDouble);
    back->to(at::kDouble);
    auto pipeline = rank == 0 ? PipelineParallel::across_ranks(front, {.micro_batches = 3})
                              : PipelineParallel::across_ranks(back, {.micro_batches = 3});
    const Data data(7);
    const auto [values, skipped, indices] = front->forward(data.input);
    const at::Tensor expected = loss_of(back->forward({values, skipped, indices}), data.target);
    EXPECT_NEAR(pipeline.step(data.input, data.target, loss_of), expected.item<double>(), 1e-12);
  });
}

/// Two stages with two replicas each: ranks 0 and 1 form one pipeline, 2 and 3 the other.
struct Grid {
  explicit Grid(int rank) : stage(rank % 2), replica(rank / 2) {
    for (int i = 0; i < 2; ++i) {
      const auto one = dist::new_group({2 * i, 2 * i + 1});
      if (i == replica) pipeline = one;
      const auto two = dist::new_group({i, i + 2});
      if (i == stage) replicas = two;
    }
  }
  const int stage, replica;
  dist::ProcessGroupPtr pipeline, replicas;
};

TEST(PipelineRanksTest, ReplicasOfThePipelineAverageGradients) {
  for (const PipelineSchedule schedule : kSchedules) {
    run_group(4, [schedule](int rank) {
      const Grid grid(rank);
      Split net(2);
      const auto& own = net.parts[static_cast<size_t>(grid.stage)];
      dist::DistributedDataParallel<nn::SequentialImpl> ddp(own, {.process_group = grid.replicas});
      auto pipeline = PipelineParallel::across_ranks(
          ddp, {.micro_batches = 3, .schedule = schedule, .process_group = grid.pipeline});
      for (uint64_t step = 0; step < 4; ++step) {
        const Data data(12, step);
        const Data half = data.part(grid.replica, 2);
        net.whole_step(data.input, data.target);
        pipeline.step(half.input, half.target, loss_of);
        expect_same_state(*own, *net.whole[static_cast<size_t>(grid.stage)], 1e-12);
        for (const auto& part : net.whole) sgd_step(*part);
        sgd_step(*own);
      }
    });
  }
}

TEST(PipelineRanksTest, NoSyncLeavesGradientsOfEachReplica) {
  run_group(4, [](int rank) {
    const Grid grid(rank);
    Split net(2);
    const auto& own = net.parts[static_cast<size_t>(grid.stage)];
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(own, {.process_group = grid.replicas});
    auto pipeline =
        PipelineParallel::across_ranks(ddp, {.micro_batches = 2, .process_group = grid.pipeline});
    const Data data(8);
    const Data half = data.part(grid.replica, 2);
    {
      const auto guard = ddp.no_sync();
      pipeline.step(half.input, half.target, loss_of);
    }
    net.whole_step(half.input, half.target);
    expect_same_state(*own, *net.whole[static_cast<size_t>(grid.stage)], 1e-12);
    pipeline.step(half.input, half.target, loss_of);  // averages the sums of both pipelines
    for (auto& part : net.whole) part->zero_grad();
    net.whole_step(data.input, data.target);
    net.whole_step(data.input, data.target);
    expect_same_state(*own, *net.whole[static_cast<size_t>(grid.stage)], 1e-12);
  });
}

TEST(PipelineRanksTest, SyncBatchNormTakesStatisticsOverAllReplicas) {
  run_group(4, [](int rank) {
    const Grid grid(rank);
    Split net(2, /*batch_norm=*/true);
    auto& own = net.parts[static_cast<size_t>(grid.stage)];
    dist::convert_sync_batchnorm(*own, grid.replicas);
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(
        own, {.broadcast_buffers = false, .process_group = grid.replicas});
    auto pipeline = PipelineParallel::across_ranks(ddp, {.micro_batches = 3,
                                                         .statistics = PipelineStatistics::kBatch,
                                                         .process_group = grid.pipeline});
    for (uint64_t step = 0; step < 3; ++step) {
      const Data data(12, step);
      const Data half = data.part(grid.replica, 2);
      net.whole_step(data.input, data.target);
      pipeline.step(half.input, half.target, loss_of);
      expect_same_state(*own, *net.whole[static_cast<size_t>(grid.stage)], 1e-11);
      for (const auto& part : net.whole) sgd_step(*part);
      sgd_step(*own);
    }
  });
}

/// A stage with batch normalisation over a group, either our layer or a converted one.
nn::Sequential synchronized(const dist::GroupOrDefault& group, bool is_converted) {
  nn::Sequential stage(nn::Linear(4, 4));
  if (is_converted) {
    stage->push_back("norm", nn::BatchNorm1d(4));
    dist::convert_sync_batchnorm(*stage, group);
  } else {
    stage->push_back("norm",
                     dist::SyncBatchNorm(dist::SyncBatchNormOptions(4).process_group(group)));
  }
  stage->to(at::kDouble);
  return stage;
}

TEST(PipelineRanksTest, StagesOfAProcessNeedGroupsOfTheirOwn) {
  run_group(2, [](int) {
    const auto one = dist::new_group({0, 1});
    const auto two = dist::new_group({0, 1});
    const auto alone = dist::new_subgroups(1);
    for (const bool is_converted : {false, true}) {
      for (const auto& group : {dist::GroupOrDefault(), dist::GroupOrDefault(one)}) {
        EXPECT_THAT(message_of<UserError>([&] {
                      PipelineParallel({nn::Linear(4, 4), synchronized(group, is_converted),
                                        synchronized(group, !is_converted)});
                    }),
                    AllOf(HasSubstr("SyncBatchNorm layer 'norm' of stage 1 (torch::nn::Sequential"),
                          HasSubstr("SyncBatchNorm layer 'norm' of stage 2"),
                          HasSubstr("of ranks 0, 1"), HasSubstr("new_group()")));
      }
      PipelineParallel apart({synchronized(one, is_converted), synchronized(two, is_converted)},
                             {.micro_batches = 2});
      const Data data(8);
      EXPECT_NO_THROW(apart.step(data.input, data.target, loss_of));
      EXPECT_NO_THROW(
          PipelineParallel({synchronized(alone, is_converted), synchronized(alone, is_converted)}));
    }
    const nn::Sequential wrapped = make_layers(0, 1);
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(wrapped, {.process_group = one});
    EXPECT_THAT(message_of<UserError>([&] {
                  PipelineParallel({ddp, synchronized(one, false)});
                }),
                AllOf(HasSubstr("DistributedDataParallel of stage 0"), HasSubstr("of stage 1")));
  });
}

TEST(PipelineRanksTest, GroupsOfAStageMustNotHaveOtherStages) {
  run_group(4, [](int rank) {
    const Grid grid(rank);
    const auto refusal = [&](const PipelineStage& stage, const dist::GroupOrDefault& group) {
      return message_of<UserError>(
          [&] { PipelineParallel::across_ranks(stage, {.process_group = group}); });
    };
    // An error of one rank is thrown on both.
    const std::string names_layer = "SyncBatchNorm layer 'norm' of stage 0 (torch::nn::Sequential";
    for (const bool is_converted : {false, true}) {
      const auto mistaken = synchronized({}, is_converted);
      const auto fine = synchronized(grid.replicas, is_converted);
      EXPECT_THAT(
          refusal(grid.stage == 0 ? mistaken : fine, grid.pipeline),
          AllOf(HasSubstr(names_layer), HasSubstr("of ranks 0, 1, 2, 3"),
                HasSubstr("rank " + std::to_string(2 * grid.replica + 1) + " has stage 1")));
      EXPECT_NO_THROW(PipelineParallel::across_ranks(fine, {.process_group = grid.pipeline}));
    }
    nn::Sequential halves(nn::Linear(4, 4));
    halves->push_back("norm", dist::SyncBatchNorm(dist::SyncBatchNormOptions(4).group_size(2)));
    EXPECT_THAT(refusal(halves, grid.pipeline),
                HasSubstr("layer 'norm' of stage " + std::to_string(grid.stage)));
    // Without a group for it, the pipeline has four stages.
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(make_layers(0, 1),
                                                          {.process_group = grid.replicas});
    EXPECT_THAT(refusal(ddp, {}),
                AllOf(HasSubstr("DistributedDataParallel of stage " + std::to_string(rank)),
                      HasSubstr(grid.stage == 0 ? "ranks 0, 2" : "ranks 1, 3"),
                      HasSubstr("PipelineOptions::process_group the ranks of one pipeline")));
  });
}

TEST(PipelineRanksTest, AStageThatThrowsEndsAllWithItsName) {
  for (const PipelineSchedule schedule : kSchedules) {
    for (const int failing : {0, 1, 2}) {
      for (const bool in_forward : {true, false}) {
        run_group(3, [=](int rank) {
          Split net(3);
          const auto throwing = std::make_shared<ThrowingImpl>();
          net.parts[static_cast<size_t>(failing)]->push_back(throwing);
          auto pipeline = pipeline_of(net, rank, {.micro_batches = 4, .schedule = schedule});
          const Data data(8);
          pipeline.step(data.input, data.target, loss_of);
          (in_forward ? throwing->in_forward : throwing->in_backward) = true;
          const std::string message =
              message_of<StageError>([&] { pipeline.step(data.input, data.target, loss_of); });
          EXPECT_THAT(
              message,
              AllOf(HasSubstr("PipelineParallel: stage " + std::to_string(failing)),
                    HasSubstr(" on rank " + std::to_string(failing) + " ("), HasSubstr("no luck")));
          throwing->in_forward = throwing->in_backward = false;
          net.whole[static_cast<size_t>(failing)]->push_back(std::make_shared<ThrowingImpl>());
          for (const int64_t samples : {5, 8}) {  // no message of the failed step may be left
            const Data other(samples, /*seed=*/99);
            for (auto* const modules : {&net.parts, &net.whole}) {
              for (auto& module : *modules) module->zero_grad();
            }
            const double expected = net.whole_step(other.input, other.target);
            EXPECT_NEAR(pipeline.step(other.input, other.target, loss_of), expected, 1e-12);
            expect_same_state(*net.parts[static_cast<size_t>(rank)],
                              *net.whole[static_cast<size_t>(rank)], 1e-12);
          }
        });
      }
    }
  }
}

TEST(PipelineRanksTest, AMistakeOnOneRankIsThrownOnAll) {
  run_group(2, [](int rank) {
    Split net(2);
    const auto& own = net.parts[static_cast<size_t>(rank)];
    EXPECT_THAT(
        message_of<UserError>([&] {
          PipelineParallel::across_ranks(
              rank == 0 ? PipelineStage(own) : PipelineStage(std::shared_ptr<nn::LinearImpl>()));
        }),
        HasSubstr("stage 1 is null"));

    auto pipeline = pipeline_of(net, rank, {.micro_batches = 4});
    const Data data(8);
    const auto failure_of = [&](const auto& body) { return message_of<syncbn::base::Error>(body); };
    EXPECT_THAT(
        failure_of([&] { pipeline.step(data.input.narrow(0, 0, 3), data.target, loss_of); }),
        HasSubstr("3 samples, fewer than micro_batches (4)"));
    EXPECT_THAT(
        failure_of([&] { pipeline.step(data.input, data.target.narrow(0, 0, 4), loss_of); }),
        HasSubstr("the target has 1 sample, the input 2"));
    EXPECT_THAT(failure_of([&] { pipeline.step(data.input, data.target, nullptr); }),
                HasSubstr("the loss is empty"));
    EXPECT_THAT(failure_of([&] {
                  if (rank == 0) {
                    pipeline.forward(data.input);
                  } else {
                    pipeline.step(data.input, data.target, loss_of);
                  }
                }),
                HasSubstr("it runs step(), its neighbour forward()"));
    for (auto& part : net.parts) part->zero_grad();
    const double expected = net.whole_step(data.input, data.target);
    EXPECT_NEAR(pipeline.step(data.input, data.target, loss_of), expected, 1e-12);
    expect_same_state(*own, *net.whole[static_cast<size_t>(rank)], 1e-12);
  });
}

TEST(PipelineRanksTest, OptionsThatDifferAreNamed) {
  run_group(2, [](int rank) {
    const Split net(2);
    EXPECT_THAT(
        message_of<UserError>([&] { pipeline_of(net, rank, {.micro_batches = 2 + rank}); }),
        AllOf(HasSubstr("stage 0 has micro_batches=2"), HasSubstr("stage 1 micro_batches=3")));
  });
}

TEST(PipelineRanksTest, ARankThatDiesIsNamed) {
  const auto results = run_group_and_collect(3, [](int rank) {
    const Split net(3);
    auto pipeline = pipeline_of(net, rank, {.micro_batches = 4});
    const Data data(8);
    pipeline.step(data.input, data.target, loss_of);
    if (rank == 1) ::raise(SIGKILL);
    EXPECT_THAT(
        message_of<dist::PeerError>([&] { pipeline.step(data.input, data.target, loss_of); }),
        HasSubstr("rank 1"));
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
  EXPECT_EQ(results[2].exit_code, 0) << results[2].output;
}

}  // namespace
