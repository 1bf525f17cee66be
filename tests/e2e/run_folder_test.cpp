#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/train/checkpoint.h>

#include <map>

#include "checkpoints/sealed_archive.h"
#include "e2e/log_lines.h"
#include "e2e/train_program.h"
#include "launch/on_terminal.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

Words short_run(const Words& more = {}) {
  return Words{"--config", shipped_config("digits.yaml"), "--epochs=1",
               "--data.test_fraction=0.6"} +
         more;
}

TEST(RunFolderProgramTest, NumbersRunsOfOneConfigurationByDefault) {
  const TempFolder cwd;
  for (const char* run : {"runs/digits", "runs/digits-2", "runs/digits-3"}) {
    const auto result = run_train(short_run(), {}, cwd.path().string());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr(std::string("writes to ") + run + "\n"));
    for (const char* file : {"config.yaml", "log.jsonl", "last.pt", "best.pt", "result.json"}) {
      EXPECT_TRUE(std::filesystem::exists(cwd.path() / run / file)) << run << "/" << file;
    }
  }
}

TEST(RunFolderProgramTest, ProposesCommandsThatAShellTakes) {
  const TempFolder cwd;
  base::write_file_atomically(cwd / "my digits.yaml",
                              base::read_file(shipped_config("digits.yaml")));
  const auto run = [&] {
    return run_train({"my digits.yaml", "--val_fraction=0.2", "--max_steps=1"}, {}, cwd.path()).err;
  };
  EXPECT_THAT(run(), HasSubstr("/train eval 'runs/my digits'\n"));
  std::filesystem::remove(cwd / "runs/my digits/result.json");  // as if the run was killed
  const std::string unfinished = "runs/my digits has a run that was not finished; to resume it: ";
  EXPECT_THAT(run(), AllOf(HasSubstr("writes to runs/my digits-2\n"), HasSubstr(unfinished),
                           HasSubstr("/train 'runs/my digits'\n")));
  EXPECT_THAT(run(), Not(HasSubstr(unfinished)));  // a later run has finished
}

TEST(RunFolderProgramTest, AResumeGoesOnWithTheNewestRun) {
  const TempFolder cwd;
  for (int run = 0; run < 2; ++run) {
    ASSERT_EQ(run_train(short_run(), {}, cwd.path()).exit_code, 0);
  }
  const auto on = run_train(short_run({"--resume=auto", "--epochs=2"}), {}, cwd.path());
  EXPECT_EQ(on.exit_code, 0) << on.err;
  EXPECT_THAT(on.err, HasSubstr("writes to runs/digits-2\n"));
  EXPECT_EQ(result_of(cwd / "runs/digits-2")["epochs"], 2);
  EXPECT_EQ(result_of(cwd / "runs/digits")["epochs"], 1);
  // The configuration in a run's folder leads to that folder.
  const auto again = run_train(
      {"--config", "runs/digits/config.yaml", "--resume=auto", "--epochs=2"}, {}, cwd.path());
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(result_of(cwd / "runs/digits")["epochs"], 2);
  // Also after the folder was moved, and from another working folder.
  std::filesystem::rename(cwd / "runs/digits", cwd / "moved");
  const TempFolder elsewhere;
  const auto moved =
      run_train({"--config", cwd / "moved/config.yaml", "--epochs=3"}, {}, elsewhere.path());
  EXPECT_EQ(moved.exit_code, 0) << moved.err;
  EXPECT_EQ(result_of(cwd / "moved")["epochs"], 3);
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere.path()));
}

TEST(RunFolderProgramTest, AConfigYamlOfOnesOwnIsNoRuns) {
  const TempFolder cwd;
  const std::string own = base::read_file(shipped_config("digits.yaml")) + "max_steps: 1\n";
  base::write_file_atomically(cwd / "own/config.yaml", own);
  std::filesystem::create_directory(cwd / "own/more");
  const std::string folder = cwd / "own";
  for (const char* file : {"config.yaml", "./config.yaml", ".", "more/../config.yaml"}) {
    const auto result = run_train({"--config", file, "--overwrite"}, {}, folder);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("writes to runs/config\n"));
  }
  // A run's configuration file leads to the run.
  for (const char* file : {"./config.yaml", ".", "../config/config.yaml"}) {
    const auto resumed =
        run_train({"--config", file, "--max_steps=2"}, {}, cwd / "own/runs/config");
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_THAT(resumed.err, HasSubstr("own/runs/config"));
    EXPECT_FALSE(std::filesystem::exists(cwd / "own/runs/config/runs"));
  }
  const auto refused = run_train({"--config", "config.yaml", "--run_dir=."}, {}, folder);
  EXPECT_EQ(refused.exit_code, base::kExitUsage);
  EXPECT_EQ(count(refused.err, "error:"), 1) << refused.err;
  EXPECT_EQ(base::read_file(cwd / "own/config.yaml"), own);
}

TEST(RunFolderProgramTest, BestHoldsTheNetworkOfTheBestEpoch) {
  const TempFolder folder;
  const auto args = [&](const std::string& run, int64_t epochs) {
    return short_run({"--schedule=constant", "--run_dir", folder / run, "--optimizer.lr=0.4",
                      fmt::format("--epochs={}", epochs)});
  };
  ASSERT_EQ(run_train(args("whole", 4)).exit_code, 0);
  const auto best = checkpoint_of(folder / "whole/best.pt");
  const int64_t best_epoch = best.best.front().epoch;
  EXPECT_EQ(best_epoch, result_of(folder / "whole")["best_epoch"]);
  EXPECT_FALSE(best.has_optimizer);
  ASSERT_EQ(run_train(args("part", best_epoch)).exit_code, 0);
  expect_same(best.model, checkpoint_of(folder / "part/last.pt").model);
}

TEST(RunFolderProgramTest, AResNetTrainsByTheStepSchedule) {
  const TempFolder folder;
  base::write_file_atomically(folder / "resnet.yaml", R"(
epochs: 3
global_batch_size: 8
model: {type: resnet18, small_input: true}
data: {type: synthetic, channels: 3, height: 8, width: 8, classes: 4, size: 32, test_size: 16}
optimizer: {type: sgd, lr: 0.05, momentum: 0.9}
schedule: {type: step, step_size: 2, gamma: 0.5}
)");
  run_ranks_of_train(2, {"--config", folder / "resnet.yaml", "--run_dir", folder / "run"});
  std::vector<double> rates;
  std::vector<double> losses;
  for (const auto& line : log_of(folder / "run", "epoch")) {
    rates.push_back(line["lr"]);
    losses.push_back(line["train_loss"]);
  }
  EXPECT_THAT(rates, ::testing::ElementsAre(0.05, 0.05, 0.025));
  EXPECT_LT(losses.at(2), losses.at(0));
}

TEST(RunFolderProgramTest, DescribesWhatItRanOn) {
  const TempFolder folder;
  const auto git = [&](const Words& words) {
    const auto done = run_program(
        Words{"git", "-C", folder.path().string(), "-c", "user.name=x", "-c", "user.email=x"} +
        words);
    EXPECT_EQ(done.exit_code, 0) << done.err;
    return done.out;
  };
  git({"init"});
  for (const char* file : {"same.txt", "new.txt"}) base::write_file_atomically(folder / file, "1");
  git({"add", "."});
  git({"commit", "--message=first"});
  base::write_file_atomically(folder / "new.txt", "2");
  const auto result = launch_train(
      2, short_run({"--max_steps=1", "--run_dir=run", "--data.test_fraction=0.2", "--threads=1"}),
      folder.path());
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto found = nlohmann::json::parse(base::read_file(folder / "run/environment.json"));
  EXPECT_THAT(found["software"]["compiler"].get<std::string>(), HasSubstr("."));
  EXPECT_THAT(found["software"]["libtorch"].get<std::string>(), ::testing::StartsWith("2."));
  EXPECT_EQ(found["command"].back(), "--threads=1");
  EXPECT_EQ(found["working_directory"], std::filesystem::canonical(folder.path()).string());
  EXPECT_EQ(found["git"]["commit"].get<std::string>() + "\n", git({"rev-parse", "HEAD"}));
  EXPECT_EQ(found["git"]["changed_files"], nlohmann::json({"new.txt"}));
  EXPECT_NE(found["job"]["SYNCBN_JOB_ID"].get<std::string>(), "");
  EXPECT_EQ(found["world_size"], 2);
  ASSERT_EQ(found["hosts"].size(), 1u);
  const auto& host = found["hosts"][0];
  EXPECT_GT(host["memory_bytes"], 1 << 20);
  ASSERT_EQ(host["ranks"].size(), 2u);
  EXPECT_EQ(host["ranks"][1]["rank"], 1);
  EXPECT_EQ(host["ranks"][1]["threads"], 1);
  EXPECT_EQ(found["data"]["train"]["samples"], 1442);
  EXPECT_NE(found["data"]["train"]["fingerprint"], found["data"]["test"]["fingerprint"]);
  // Outside of a checkout there is no commit to record.
  const TempFolder other;
  ASSERT_EQ(run_train(short_run({"--max_steps=1"}), {}, other.path()).exit_code, 0);
  EXPECT_TRUE(nlohmann::json::parse(base::read_file(other / "runs/digits/environment.json"))["git"]
                  .is_null());
}

TEST(RunDisplayProgramTest, TensorBoardReadsEveryNumberOfTheLog) {
  SYNCBN_SKIP_UNLESS(python_has("tensorboard"), "tensorboard");
  const TempFolder folder;
  const std::string run = folder / "run";
  for (const char* epochs : {"--epochs=1", "--epochs=2"}) {
    const Words words = digits(run, {"--log_interval=1", "--ema.decay=0.9", epochs, "--resume=auto",
                                     "--tensorboard.histograms=1"});
    ASSERT_EQ(run_train(words).exit_code, 0);
  }
  const auto read = [&](const Words& more) {
    const auto result =
        run_program(Words{python(), SYNCBN_SOURCE_DIR "/tests/support/read_events.py", run} + more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  };
  std::map<std::string, nlohmann::json> expected;
  for (const auto& json : log_of(run)) {
    const std::string event = json["event"];
    if (event != "step" && event != "epoch" && event != "step_time") continue;
    const auto expect = [&](const std::string& tag, const nlohmann::json& value) {
      expected[tag].push_back({json["step"], static_cast<float>(value.get<double>())});
    };
    for (const auto& [key, value] : json.items()) {
      if (key == "event" || key == "time" || key == "step") continue;
      for (size_t rank = 0; value.is_array() && rank < value.size(); ++rank) {
        expect(event + "/" + key + "/" + std::to_string(rank), value[rank]);
      }
      if (value.is_array()) continue;
      const size_t split = key.find('_');
      const bool is_of_split = key.starts_with("train_") || key.starts_with("test_");
      expect(is_of_split ? key.substr(0, split) + "/" + key.substr(split + 1) : event + "/" + key,
             value);
    }
  }
  EXPECT_THAT(expected, ::testing::SizeIs(::testing::Ge(24)));
  const auto found = nlohmann::json::parse(read({}));
  EXPECT_EQ(found.size(), expected.size()) << found.dump();
  for (const auto& [tag, values] : expected) {
    ASSERT_TRUE(found.contains(tag)) << tag;
    EXPECT_EQ(found[tag], values) << tag;
  }
  EXPECT_EQ(count(read({"parameters/conv1.weight"}), "\n"), 2) << read({"parameters/conv1.weight"});
  EXPECT_EQ(count(read({"gradients/conv1.weight"}), "\n"), 2);
  EXPECT_THAT(read({"hparams"}), HasSubstr("optimizer.type 'sgd'\n"));
}

TEST(RunDisplayProgramTest, WatchShowsARunToItsEnd) {
  const TempFolder folder;
  const auto run = start_train(digits(folder / "run", {"--epochs=10000"}));
  ASSERT_TRUE(run->wait_until([&] { return count(run->err(), "epoch ") > 0; })) << run->err();
  OnTerminal terminal({program("train"), "watch", folder / "run"});
  ASSERT_TRUE(terminal.shows("running"));
  ASSERT_TRUE(terminal.shows("step loss"));
  ASSERT_TRUE(terminal.shows("train loss"));
  OnTerminal other({program("train"), "watch", folder / "run"});
  ASSERT_TRUE(other.shows("running"));
  other.hang_up();
  EXPECT_NE(other.wait(), base::kExitInternal);
  run->send_signal(SIGTERM);
  ASSERT_TRUE(terminal.shows("stopped: SIGTERM; watch ends in "));
  EXPECT_EQ(run->wait().exit_code, base::kExitPreempted);
  std::filesystem::last_write_time(
      folder / "run/log.jsonl",
      std::filesystem::file_time_type::clock::now() - std::chrono::minutes(5));
  EXPECT_EQ(terminal.wait(), 0);

  const auto again = run_train({"watch", folder / "run"});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out, ::testing::StartsWith("run  stopped: SIGTERM  1 rank\n"));
  EXPECT_THAT(again.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(run_train({"watch", folder / "run", "--color=always"}).out, HasSubstr("\x1b[31m"));
  expect_mistake(run_train({"watch"}), "watch: name the folder of a run first");
  expect_mistake(run_train({"watch", folder.path()}), "it has no log.jsonl");
  expect_mistake(run_train({"watch", folder / "run", "--color=blue"}),
                 "expected one of auto, always, never, got 'blue'");
  expect_mistake(run_train({"watch", folder / "run", "--dry_run"}), "--dry_run: only for train");
}

TEST(RunDisplayProgramTest, MessagesAreInColoursWhereTheyAreWanted) {
  const TempFolder folder;
  const auto args = [&](const Words& more) {
    return short_run({"--max_steps=1", "--overwrite", "--run_dir", folder / "run"}) + more;
  };
  EXPECT_THAT(run_train(args({})).err, Not(HasSubstr("\x1b[")));
  EXPECT_THAT(run_train(args({"--color=always"})).err, HasSubstr("\x1b["));
  // On a terminal, look for the colours of SGR; the sequence that erases a line is not one.
  const auto on_terminal = [&](const Words& words, const Env& env) {
    OnTerminal terminal(Words{program("train")} + words, 60, env);
    EXPECT_EQ(terminal.wait(), 0);
    return terminal.screen();
  };
  EXPECT_THAT(on_terminal(args({}), {}), HasSubstr("\x1b[32mI"));
  EXPECT_THAT(on_terminal(args({}), {{"NO_COLOR", "1"}}), Not(HasSubstr("\x1b[3")));
  EXPECT_THAT(on_terminal(args({"--color=never"}), {}), Not(HasSubstr("\x1b[3")));
  EXPECT_THAT(on_terminal(args({"--color=always"}), {{"NO_COLOR", "1"}}), HasSubstr("\x1b[32mI"));
  const std::string run = folder / "run";
  EXPECT_THAT(on_terminal({"watch", run}, {}), HasSubstr("\x1b[3"));
  EXPECT_THAT(on_terminal({"watch", run}, {{"NO_COLOR", "1"}}), Not(HasSubstr("\x1b[3")));
  EXPECT_THAT(on_terminal({"watch", run, "--color=never"}, {}), Not(HasSubstr("\x1b[3")));
  OnTerminal terminal(Words{program("train")} +
                      short_run({"--run_dir", folder / "shown", "--epochs=5"}));
  ASSERT_TRUE(terminal.shows("\x1b[32mI"));
  ASSERT_TRUE(terminal.shows("]   "));  // part of the bar
  EXPECT_EQ(terminal.wait(), 0);
}

TEST(RunDisplayProgramTest, TheBarShowsHowTheTrainingGoes) {
  const TempFolder folder;
  OnTerminal terminal(Words{program("train")} + digits(folder / "run", {"--epochs=10000"}), 200);
  // The metric appears after the first evaluation.
  ASSERT_TRUE(terminal.shows("  test accuracy "));
  terminal.type("\x03");
  EXPECT_EQ(terminal.wait(), base::kExitSignalBase + SIGINT);
  EXPECT_THAT(
      terminal.screen(),
      ContainsRegex("\\[#*\\.+\\]  [0-9]+/[0-9]+  +[0-9]+ %  epoch [0-9]+/10000  loss [0-9.]+  "
                    "test accuracy [0-9.]+ %  lr [0-9.]+  [0-9]+ images/s  "
                    "data wait [0-9.]+ %  [0-9.]+ [MG]B  [0-9:]+ < [0-9:]+"));
}

/// The widths, in columns, of the lines that a program redraws on a terminal.
std::vector<int> widths_of_bars(const std::string& screen) {
  const std::string erase = "\r\x1b[K";
  std::vector<int> widths;
  for (size_t at = 0; (at = screen.find(erase, at)) != screen.npos;) {
    at += erase.size();
    const std::string line = screen.substr(at, screen.find_first_of("\r\x1b", at) - at);
    if (!line.empty()) widths.push_back(base::columns_of(line));
  }
  return widths;
}

TEST(RunDisplayProgramTest, ATerminalOf20ColumnsIsWideEnough) {
  const TempFolder folder;
  for (const char* run : {"one", "two"}) {
    OnTerminal terminal(
        Words{program("train")} + digits(folder / run, {"--epochs=2", "--color=always"}), 20);
    EXPECT_EQ(terminal.wait(), 0);
    const auto widths = widths_of_bars(terminal.screen());
    EXPECT_THAT(widths, Not(::testing::IsEmpty())) << terminal.screen();
    EXPECT_THAT(widths, ::testing::Each(::testing::Le(19)));
  }
  OnTerminal watch({program("train"), "watch", folder / "one", "--color=never"}, 20);
  EXPECT_EQ(watch.wait(), 0);
  EXPECT_THAT(widths_of_bars(watch.screen()), ::testing::Each(::testing::Le(19)));
  // If a table is wider than the terminal, it is printed as a list.
  const Words compare = {program("train"), "compare", folder / "one", folder / "two"};
  OnTerminal narrow(compare, 20);
  EXPECT_EQ(narrow.wait(), 0);
  EXPECT_THAT(narrow.screen(), ContainsRegex("^(one|two) .*\r\n  best_test_accuracy [0-9.]+ %"));
  OnTerminal wide(compare, 200);
  EXPECT_EQ(wide.wait(), 0);
  EXPECT_THAT(wide.screen(), HasSubstr("best_test_accuracy  best_epoch  "));
}

TEST(RunFolderProgramTest, AFullDiskUnderTheReportDoesNotEndTheRun) {
  const TempFolder folder;
  ASSERT_EQ(run_train(digits(folder / "run", {"--epochs=1"})).exit_code, 0);
  std::filesystem::remove(folder / "run/report.html");
  std::filesystem::create_symlink("/dev/full", folder / "run/report.html");
  const auto resumed = run_train(digits(folder / "run", {"--resume=auto", "--epochs=4"}));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(count(resumed.err, "no report: "), 1) << resumed.err;
  EXPECT_THAT(resumed.err, ContainsRegex("no report: .*No space left.*; the run goes on\n"));
  EXPECT_EQ(result_of(folder / "run")["epochs"], 4);
}

TEST(RunFolderProgramTest, ANewerCheckpointIsRefusedAndKept) {
  const TempFolder folder;
  const std::string run = folder / "run";
  ASSERT_EQ(run_train(short_run({"--max_steps=1", "--run_dir", run})).exit_code, 0);
  train::Dict newer = train::make_dict();
  train::put(newer, "format", std::string(train::Checkpoint::kFormat));
  train::put(newer, "format_version", train::Checkpoint::kFormatVersion + 1);
  // An older checkpoint, of this version, must not be used instead.
  std::filesystem::rename(folder / "run/last.pt", folder / "run/step-000000000001.pt");
  for (const char* file : {"/last.pt", "/best.pt"}) train::write_sealed_archive(newer, run + file);
  for (const Words& args : {Words{run, "--max_steps=2"}, {"eval", run}, {"export", run}}) {
    SCOPED_TRACE(args.front());
    expect_mistake(run_train(args),
                   ".pt is the checkpoint of a newer version of train (it has format 2, this "
                   "version reads 1); use that version");
    EXPECT_TRUE(std::filesystem::exists(folder / "run/last.pt"));
  }
}

TEST(RunFolderProgramTest, EvaluatesACheckpointWhoseNameIsNotUtf8) {
  const TempFolder folder;
  ASSERT_EQ(run_train(short_run({"--max_steps=1", "--run_dir", folder / "run"})).exit_code, 0);
  std::filesystem::rename(folder / "run/best.pt", folder / "caf\xe9.pt");
  const auto result = run_train({"eval", folder / "run", "--resume", folder / "caf\xe9.pt"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_THAT(json["checkpoint"].get<std::string>(), ::testing::EndsWith("/caf\\xe9.pt"));
  EXPECT_TRUE(json.contains("accuracy"));
}

TEST(RunDisplayProgramTest, TheBarGoesOnInEvaluations) {
  const TempFolder folder;
  const Words words =
      digits(folder / "run", {"--epochs=1", "--data.type=synthetic", "--data.channels=1",
                              "--data.height=8", "--data.width=8", "--data.classes=10",
                              "--data.size=64", "--data.test_size=8000", "--sampler=distributed"});
  const auto shown = [&](const Words& first, const std::string& text) {
    OnTerminal terminal(Words{program("train")} + first + words);
    EXPECT_TRUE(terminal.shows(text));
    EXPECT_EQ(terminal.wait(), 0);
    return terminal.screen();
  };
  shown({}, "  epoch 1/1  test ");
  EXPECT_THAT(shown({"eval"}, "/1000 "),
              AllOf(HasSubstr(" on 8000 test samples:  loss "), Not(HasSubstr("\"loss\":"))));
}

TEST(RunFolderProgramTest, DoesNotReplaceARunUnasked) {
  const TempFolder folder;
  ASSERT_EQ(run_train(short_run({"--run_dir", folder / "run"})).exit_code, 0);
  const std::string log = base::read_file(folder / "run/log.jsonl");
  expect_mistake(run_train(short_run({"--run_dir", folder / "run"})), "already holds a run");
  EXPECT_EQ(base::read_file(folder / "run/log.jsonl"), log);
  const auto replaced = run_train(short_run({"--run_dir", folder / "run", "--overwrite"}));
  EXPECT_EQ(replaced.exit_code, 0) << replaced.err;
  EXPECT_EQ(count(base::read_file(folder / "run/log.jsonl"), "\"start\""), 1);
}

}  // namespace
}  // namespace syncbn::test
