// Runs that began in PyTorch's scripts.
#include <ATen/core/List.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/models/torch_archive.h>
#include <syncbn/models/weights.h>

#include "e2e/train_program.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class PythonRunProgramTest : public ::testing::Test {
 protected:
  Words args(const std::string& run, const Words& more = {}) const {
    return digits(path_of(run),
                  {"--epochs=1", "--sampler=distributed", "--schedule=step", "--ema.decay=0.9"}) +
           more;
  }

  /// Writes NAME.pth as main.py does after the epoch of the run `first`, without momentum.
  std::string write_script_checkpoint(const std::string& name) const {
    models::Dict weights = models::make_dict();
    std::vector<std::string> parameters;
    for (const auto& item : models::read_state_dict(path_of("first/last.pt"))) {
      models::put(weights, item.key(), item.value());
      const bool is_buffer = item.key().find("running_") != std::string::npos ||
                             item.key().ends_with("num_batches_tracked");
      if (!is_buffer) parameters.push_back(item.key());
    }
    c10::impl::GenericList numbers(c10::AnyType::get());
    for (int64_t i = 0; i < std::ssize(parameters); ++i) numbers.emplace_back(i);
    models::Dict group = models::make_dict();
    models::put(group, "params", numbers);
    for (const char* key : {"lr", "initial_lr"}) models::put(group, key, 0.1);
    models::put(group, "momentum", 0.9);
    models::put(group, "dampening", 0.0);
    models::put(group, "weight_decay", 1e-4);
    models::put(group, "nesterov", false);
    c10::impl::GenericList groups(c10::AnyType::get());
    groups.emplace_back(group);
    models::Dict optimizer = models::make_dict();
    models::put(optimizer, "state", models::make_dict());
    models::put(optimizer, "param_groups", groups);
    models::Dict scheduler = models::make_dict();
    models::put(scheduler, "step_size", 30);
    models::put(scheduler, "gamma", 0.1);
    models::Dict run = models::make_dict();
    models::put(run, "epoch", 1);
    models::put(run, "state_dict", weights);
    models::put(run, "optimizer", optimizer);
    models::put(run, "scheduler", scheduler);
    const std::string file = path_of(name + ".pth");
    models::write_parts(file,
                        [&](const models::Sink& sink) { models::write_torch_archive(run, sink); });
    return file;
  }

  std::string path_of(const std::string& file) const { return folder_ / file; }

  const TempFolder folder_;
};

TEST_F(PythonRunProgramTest, GoesOnAtTheEndOfItsEpoch) {
  ASSERT_EQ(run_train(args("first")).exit_code, 0);
  const std::string file = write_script_checkpoint("imagenet");
  const auto resumed = run_train(args("second", {"--epochs=2", "--resume=" + file}));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, AllOf(HasSubstr("resumes from " + file + " at epoch 2, step 181"),
                                 Not(HasSubstr("warning"))));
}

TEST_F(PythonRunProgramTest, ADifferenceIsWarnedOfOnceAndAMistakeIsOneMessage) {
  ASSERT_EQ(run_train(args("first")).exit_code, 0);
  const std::string file = write_script_checkpoint("imagenet");
  const std::string resume = "--resume=" + file;
  const auto warned = launch_train(
      2, args("other", {resume, "--epochs=2", "--optimizer.lr=0.05", "--schedule.gamma=0.5"}));
  EXPECT_EQ(warned.exit_code, 0) << warned.err;
  EXPECT_EQ(count(warned.err, "was made with another configuration"), 1) << warned.err;
  EXPECT_THAT(warned.err, HasSubstr("optimizer.lr 0.05 (was 0.1), schedule.gamma 0.5 (was 0.1)"));

  const auto expect = [&](const Words& more, const std::string& message) {
    expect_mistake(launch_train(2, args("mistake", more)), message);
  };
  expect({resume, "--optimizer=adamw"},
         "cannot resume from " + file + ": it was made with optimizer.type sgd");
  expect({resume, "--model.width=8"}, "of another shape: conv1.weight");
  expect({resume}, "is at the end of epoch 1 of 1; to train on, raise epochs");
  const std::string whole = base::read_file(file);
  base::write_file_atomically(path_of("cut.pth"), whole.substr(0, whole.size() / 2));
  expect({"--resume=" + path_of("cut.pth")}, "it is damaged, truncated or another");
  models::Dict weights = models::make_dict();
  models::put(weights, "state_dict", models::make_dict());
  models::write_parts(path_of("weights.pth"), [&](const models::Sink& sink) {
    models::write_torch_archive(weights, sink);
  });
  expect({"--resume=" + path_of("weights.pth")},
         "to begin with its weights, set init=" + path_of("weights.pth"));
}

}  // namespace
}  // namespace syncbn::test
