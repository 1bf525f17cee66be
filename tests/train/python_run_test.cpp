// Runs of PyTorch's scripts continue here with the same bits in float64.
#include "checkpoints/python_run.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>
#include <syncbn/models/torch_archive.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/schedule.h>
#include <torch/version.h>

#include <memory>

#include "checkpoints/resume.h"
#include "step/model.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// As in python_run.py.
constexpr int64_t kEpochsDone = 2;
constexpr int64_t kStepsOfEpoch = 2;
constexpr int64_t kStepsDone = kEpochsDone * kStepsOfEpoch;
constexpr int64_t kImages = 4;

constexpr int64_t kStepsAfter = 5;

struct PythonCase {
  std::string name;
  std::string optimizer;
  std::string schedule;
  std::string model = "shufflenet_v2_x0_5";
};

const PythonCase kImagenet = {
    "imagenet", "{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 1e-4, fused: false}",
    "{type: step, step_size: 1, gamma: 0.1}", "resnet18"};
const std::vector<PythonCase> kPythonCases = {
    kImagenet,
    {"step",
     "{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 1e-4, nesterov: true, fused: false}",
     "{type: step, step_size: 2, gamma: 0.3, warmup: 1, warmup_start: 0.1, by_epoch: true}"},
    {"multistep",
     "{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01, no_decay: [norm], fused: false}",
     "{type: multistep, milestones: [1, 3, 4], gamma: 0.3}"},
    {"cosine", "{type: adamw, lr: 1e-3, weight_decay: 0.05, fused: false}",
     "{type: cosine, warmup: 3, warmup_start: 0.1, by_epoch: true}"},
    {"exponential", "{type: rmsprop, lr: 1e-3, momentum: 0.9, eps: 0.03, alpha: 0.9}",
     "{type: exponential, gamma: 0.9, by_epoch: true}"},
    {"adam", "{type: adam, lr: 1e-3, betas: [0.8, 0.99], amsgrad: true, fused: false}",
     "{type: cosine, min_lr: 1e-5, by_epoch: true}"},
};

Config config_of(const PythonCase& one) {
  const std::string text = fmt::format(
      "{{epochs: 8, batch_size: {}, model: {}, data: synthetic, ema: {{decay: 0.9}}, "
      "optimizer: {}, schedule: {}}}",
      kImages, one.model, one.optimizer, one.schedule);
  Config config;
  config::Faults faults;
  config::Schema<Config>::get().read(config::parse_yaml(text, "test"), config, "", faults);
  faults.throw_if_any();
  return config;
}

std::string text_of(const Config& config) {
  return config::to_yaml(config::Schema<Config>::get().write(config));
}

/// Trains a float64 network on the batches of python_run.py.
class Training {
 public:
  explicit Training(const Config& config) : config_(config) {
    at::manual_seed(2);
    model_ = config.model.make(models::ModelArgs{.num_classes = 10, .sample_shape = {3, 32, 32}});
    model_->to(at::kDouble);
    optimizer_ = config.optimizer.make(trainable_parameters(*model_));
    schedule_ =
        config.schedule.make(ScheduleArgs{optimizer_->base_lr(), config.epochs, kStepsOfEpoch});
  }

  models::Model& model() { return *model_; }
  const Optimizer& optimizer() const { return *optimizer_; }

  Checkpoint read(const std::string& path) {
    return read_python_run(path, {.model = *model_,
                                  .optimizer = *optimizer_,
                                  .config = text_of(config_),
                                  .start = {.seed = 7, .fingerprint = 3},
                                  .steps_per_epoch = kStepsOfEpoch});
  }

  void resume(const Checkpoint& checkpoint) {
    load_model(checkpoint.model, *model_);
    optimizer_->load(checkpoint.optimizer);
  }

  at::Tensor train(int64_t first, int64_t steps) {
    std::vector<at::Tensor> losses;
    for (int64_t step = first; step < first + steps; ++step) {
      at::manual_seed(static_cast<uint64_t>(100 + step));
      const at::Tensor images = at::randn({kImages, 3, 32, 32}, at::kDouble);
      const at::Tensor labels = at::randint(10, {kImages}, at::kLong);
      const at::Tensor loss = at::cross_entropy_loss(model_->forward(images), labels);
      model_->zero_grad();
      loss.backward();
      optimizer_->step(schedule_->lr(step));
      losses.push_back(loss.detach());
    }
    return at::stack(losses);
  }

 private:
  const Config config_;
  std::shared_ptr<models::Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Schedule> schedule_;
};

class PythonRunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(
        test::python_torch_version() == TORCH_VERSION && test::python_has("torchvision"),
        "torchvision");
    at::set_num_threads(1);
  }

  /// @param steps number of those that Python takes after the checkpoint
  void save_in_python(const std::vector<PythonCase>& cases, int64_t steps = 0) {
    std::vector<std::string> command = {test::python(), "-W", "ignore",
                                        SYNCBN_SOURCE_DIR "/tests/train/python_run.py"};
    command.insert(command.end(), {folder_.path().string(), fmt::format("{}", steps)});
    for (const PythonCase& one : cases) command.push_back(one.name);
    const auto result = test::run_program(command);
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }

  std::string file_of(const PythonCase& one, const std::string& ending = ".pth") const {
    return folder_ / (one.name + ending);
  }

  /// Compares with the steps of python_run.py.
  void expect_result(const PythonCase& one, const at::Tensor& losses, const models::Model& model) {
    const std::string file = file_of(one, "-result.pth");
    const auto result = models::read_torch_values(file).toGenericDict();
    EXPECT_TRUE(at::equal(losses, result.at("losses").toTensor()))
        << one.name << "\n"
        << losses << "\n"
        << result.at("losses").toTensor();
    const auto expected = models::read_state_dict(file, "model");
    const auto found = models::state_dict(model);
    ASSERT_EQ(found.keys(), expected.keys());
    for (const auto& item : expected) {
      EXPECT_TRUE(at::equal(found[item.key()], item.value())) << one.name << " " << item.key();
    }
  }

  /// @param one the case to resume from
  static std::string error_of(const PythonCase& one, const std::string& file) {
    return test::message_of<base::UserError>([&] { Training(config_of(one)).read(file); });
  }

  const test::TempFolder folder_;
};

TEST_F(PythonRunTest, GoesOnHereWithTheSameBits) {
  ASSERT_NO_FATAL_FAILURE(save_in_python(kPythonCases, kStepsAfter));
  for (const PythonCase& one : kPythonCases) {
    const Config config = config_of(one);
    Training run(config);
    const Checkpoint checkpoint = run.read(file_of(one));
    EXPECT_THAT(changed_settings(config::parse_yaml(checkpoint.config, "file"),
                                 config::parse_yaml(text_of(config), "config")),
                ElementsAre())
        << one.name;
    EXPECT_EQ(checkpoint.step, kStepsDone);
    EXPECT_EQ(checkpoint.sampler.epoch, kEpochsDone);
    EXPECT_EQ(checkpoint.sampler.seed, 7);
    EXPECT_EQ(checkpoint.ema.empty(), one.name == "imagenet");
    run.resume(checkpoint);
    expect_result(one, run.train(checkpoint.step, kStepsAfter), run.model());
  }
}

using PythonRunFileTest = PythonRunTest;  // ctest runs it beside the other

TEST_F(PythonRunFileTest, NamesHyperparametersThatDiffer) {
  ASSERT_NO_FATAL_FAILURE(save_in_python({kImagenet}));
  PythonCase other = kImagenet;
  other.optimizer = "{type: sgd, lr: 0.2, momentum: 0.8, weight_decay: 1e-5, no_decay: [bias]}";
  other.schedule = "{type: step, step_size: 30, gamma: 0.2}";
  const auto changed = [&] {
    const Config config = config_of(other);
    const Checkpoint checkpoint = Training(config).read(file_of(kImagenet));
    return changed_settings(config::parse_yaml(checkpoint.config, "file"),
                            config::parse_yaml(text_of(config), "config"));
  };
  EXPECT_THAT(
      changed(),
      ElementsAre("optimizer.lr 0.2 (was 0.1)", "optimizer.weight_decay 1.0e-05 (was 0.0001)",
                  "optimizer.no_decay [bias] (was [])", "optimizer.momentum 0.8 (was 0.9)",
                  "schedule.step_size 30 (was 1)", "schedule.gamma 0.2 (was 0.1)"));
  other.schedule = "cosine";
  EXPECT_THAT(changed(), ::testing::Contains("schedule.type cosine (was step)"));
  other.optimizer = "adamw";
  EXPECT_THAT(test::message_of<base::UserError>(changed),
              HasSubstr("it was made with optimizer.type sgd and this configuration has adamw"));
}

TEST_F(PythonRunFileTest, RefusesWhatDoesNotFit) {
  const PythonCase& grouped = kPythonCases[2];
  ASSERT_NO_FATAL_FAILURE(save_in_python({grouped}));
  EXPECT_THAT(error_of(kImagenet, file_of(grouped)), HasSubstr("the weights do not fit"));
  PythonCase other = grouped;
  other.optimizer = "sgd";
  EXPECT_THAT(error_of(other, file_of(grouped)),
              AllOf(HasSubstr("group 1 of its optimizer does not fit: it has 58 parameters, the "
                              "configuration 170; set model, optimizer.no_decay")));
  // The same number of parameters with other shapes.
  other.optimizer = "{type: sgd, groups: [{match: bias, lr: 2x}, {match: conv1.0.weight, lr: 2x}]}";
  EXPECT_THAT(error_of(other, file_of(grouped)),
              HasSubstr("group 1 of its optimizer does not fit: momentum_buffer of parameter "));
}

TEST_F(PythonRunFileTest, NamesWhatIsWrongInTheFile) {
  const PythonCase& adam = kPythonCases[3];
  ASSERT_NO_FATAL_FAILURE(save_in_python({adam}));
  constexpr const char* kChange = R"(
import fractions, sys, torch
def save(name, change):
    run = torch.load(sys.argv[1], weights_only=False)
    change(run, run["optimizer"]["state"][0], run["optimizer"]["param_groups"])
    torch.save(run, f"{sys.argv[2]}/{name}.pth")
save("strange", lambda run, state, groups: run["optimizer"].update(param_groups={"lr": 1}))
save("empty", lambda run, state, groups: groups.clear())
save("negative", lambda run, state, groups: run.update(epoch=-5))
save("huge", lambda run, state, groups: run.update(epoch=10**15))
save("text", lambda run, state, groups: run.update(epoch="3"))
save("incomplete", lambda run, state, groups: state.pop("exp_avg_sq"))
save("nan", lambda run, state, groups: state["exp_avg"].fill_(float("nan")))
save("inf", lambda run, state, groups: run["model"]["fc.bias"].fill_(float("inf")))
save("maximize", lambda run, state, groups: groups[0].update(maximize=True))
save("object", lambda run, state, groups: groups[0].update(weight_decay=fractions.Fraction(1, 10)))
)";
  const auto changed =
      test::run_program({test::python(), "-c", kChange, file_of(adam), folder_.path()});
  ASSERT_EQ(changed.exit_code, 0) << changed.err;
  const auto error = [&](const std::string& name) {
    EXPECT_TRUE(is_python_run(folder_.path() / (name + ".pth")));
    return error_of(adam, folder_ / (name + ".pth"));
  };
  EXPECT_THAT(error("strange"), HasSubstr("it is not laid out as a checkpoint of"));
  EXPECT_THAT(error("empty"), HasSubstr("its optimizer has no param_groups"));
  EXPECT_THAT(error("negative"), HasSubstr("its epoch is -5; expected a whole number from 0"));
  EXPECT_THAT(error("huge"), HasSubstr("its epoch is 1000000000000000; expected"));
  EXPECT_THAT(error("text"), HasSubstr("its epoch is no number; expected"));
  EXPECT_THAT(error("incomplete"), HasSubstr("its optimizer has no exp_avg_sq of conv1.0.weight"));
  EXPECT_THAT(error("nan"), HasSubstr("its 'exp_avg' has values that are infinite or NaN"));
  EXPECT_THAT(error("inf"), HasSubstr("its 'fc.bias' has values that are infinite or NaN"));
  EXPECT_THAT(error("maximize"), HasSubstr("its optimizer maximizes the loss"));
  EXPECT_THAT(error("object"), HasSubstr("its 'weight_decay' is the Python object fractions."));
}

}  // namespace
}  // namespace syncbn::train
