// The pages of `train report` and `train compare`, and how they work in a headless browser.
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/data/image.h>
#include <syncbn/train/report.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "common/csv.h"
#include "records/contact_sheet.h"
#include "records/mistakes.h"
#include "report/confusion.h"
#include "report/embedded_picture.h"
#include "report/number_table.h"
#include "report/report_writer.h"
#include "report/result_table.h"
#include "support/program.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/text.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxPageBytes = 3'000'000;

// ---- folders of runs
// -----------------------------------------------------------------------------

struct FakeRun {
  std::string task = "classification";
  double lr = 0.1;
  int64_t seed = 0;
  int64_t epochs = 5;
  int64_t steps_per_epoch = 20;
  double best = 0.9;
  bool is_finished = true;
  std::string init = {};
};

std::string config_of(const FakeRun& run) {
  return fmt::format(
      "seed: {}\nepochs: {}\nbatch_size: 8\nmodel:\n  type: digits\n  width: 16\ntask:\n  type: "
      "{}\n"
      "data:\n  type: digits\noptimizer:\n  type: sgd\n  lr: {}\n  momentum: 0\nrun_dir: "
      "\"${{here}}\"\n"
      "checkpoint:\n  keep_best:\n    metric: \"\"\n    mode: auto\ninit: \"{}\"\n",
      run.seed, run.epochs, run.task, run.lr, run.init);
}

std::string log_of(const FakeRun& run) {
  static int runs = 0;  // gives each run its own start time
  std::string log =
      fmt::format(R"({{"event":"start","time":{},"format_version":1,"world_size":2,"step":0}})"
                  "\n",
                  100 + 0.001 * ++runs);
  for (int64_t epoch = 1; epoch <= run.epochs; ++epoch) {
    const double progress = static_cast<double>(epoch) / static_cast<double>(run.epochs);
    for (int64_t i = 1; i <= run.steps_per_epoch; ++i) {
      const int64_t step = (epoch - 1) * run.steps_per_epoch + i;
      log += fmt::format(
          R"({{"event":"step","time":{},"epoch":{},"step":{},"loss":{},"lr":{},"data_wait_seconds":1e-05}})"
          "\n",
          100 + step, epoch, step, 2.0 / static_cast<double>(step), run.lr * (1 - progress));
    }
    log += fmt::format(
        R"({{"event":"epoch","time":200,"epoch":{},"step":{},"lr":0.1,"train_loss":{},"test_loss":null,"test_accuracy":{},"test_accuracy_a<b":{},"test_accuracy_cat":null,"images_per_second":1234.5,"data_wait_share":0.01,"seconds":{}}})"
        "\n",
        epoch, epoch * run.steps_per_epoch, 1 - progress, run.best * progress, 0.5 * progress,
        2 * epoch);
  }
  return log;
}

void replace_in(const fs::path& file, const std::string& old, const std::string& by) {
  std::string text = base::read_file(file);
  for (size_t at = 0; (at = text.find(old, at)) != text.npos; at += by.size()) {
    text.replace(at, old.size(), by);
  }
  std::ofstream(file) << text;
}

class ReportTest : public ::testing::Test {
 protected:
  fs::path add_run(const std::string& name, const FakeRun& run = {}) {
    fs::create_directories(folder_ / name);
    folder_.write(name + "/config.yaml", config_of(run));
    folder_.write(name + "/log.jsonl", log_of(run));
    folder_.write(name + "/confusion.csv",
                  "label/answer,a<b,\"c,\"\"d\"\"\"\na<b,5,1\n\"c,\"\"d\"\"\",0,6\n");
    if (run.is_finished) {
      const Json result = {{"best_test_accuracy", run.best},
                           {"best_mode", "max"},
                           {"best_epoch", run.epochs},
                           {"test_accuracy", run.best},
                           {"train_loss", 0.0},
                           {"epochs", run.epochs},
                           {"seconds", 2.0 * static_cast<double>(run.epochs)},
                           {"world_size", 2}};
      folder_.write(name + "/result.json", result.dump());
    }
    return folder_ / name;
  }

  void add_picture(const fs::path& run, const std::string& name, int64_t step, int64_t side) const {
    data::Image image(side, side, 3);
    uint32_t state = static_cast<uint32_t>(step) + 1;
    for (uint8_t& value : image.pixels) {
      state = state * 1664525 + 1013904223;
      value = static_cast<uint8_t>(state >> 24);
    }
    base::write_file_atomically(run / "pictures" / fmt::format("{}-{:012}.png", name, step),
                                data::encode_png(image));
  }

  test::TempFolder folder_;
};

/// Not HasSubstr(), which would print a whole page.
bool has(const std::string& page, const std::string& part) {
  return page.find(part) != std::string::npos;
}

/// The data in a page.
Json data_in(const std::string& page) {
  const std::string begin = R"(<script type="application/json" id="data">)";
  const size_t first = page.find(begin) + begin.size();
  return Json::parse(page.substr(first, page.find("</script>", first) - first));
}

std::string refusal(const std::function<void()>& work) {
  return test::message_of<base::UserError>(work);
}

// ---- parts
// ---------------------------------------------------------------------------------------

TEST(NumberTableTest, ThinnedRowsAreMeansWithTheRangeOfTheLoss) {
  NumberTable table;
  for (int i = 1; i <= 6; ++i) {
    table.add({{"event", "step"}, {"step", i}, {"loss", i == 2 ? Json(nullptr) : Json(i * i)}});
  }
  EXPECT_EQ(table.thinned(6).json().dump(), R"({"step":[1,2,3,4,5,6],"loss":[1,null,9,16,25,36]})");
  EXPECT_EQ(table.thinned(2).json().dump(),
            R"({"step":[3,6],"loss":[5,25.6667],"loss_min":[1,16],"loss_max":[9,36]})");
  NumberTable without_loss;
  for (int i = 0; i < 3; ++i) without_loss.add({{"loss_min", i}});
  EXPECT_EQ(without_loss.thinned(1).json().dump(), R"({"loss_min":[1]})");
}

TEST(NumberTableTest, RowsMayHaveOtherKeys) {
  NumberTable table;
  table.add({{"a", 1.5}});
  table.add({{"b", 2}, {"a", 3}});
  table.add({{"text", "x"}});
  EXPECT_EQ(table.json().dump(), R"({"a":[1.5,3,null],"b":[null,2,null]})");
  EXPECT_EQ(last_number(*table.find("a")), 3);
  EXPECT_EQ(table.find("text"), nullptr);
}

TEST(EmbeddedPictureTest, Base64IsThatOfRfc4648) {
  EXPECT_EQ(base64(""), "");
  EXPECT_EQ(base64("f"), "Zg==");
  EXPECT_EQ(base64("fo"), "Zm8=");
  EXPECT_EQ(base64("foobar"), "Zm9vYmFy");
  EXPECT_EQ(base64("\xff\xef\xbe"), "/+++");
}

TEST_F(ReportTest, PicturesAreMadeSmallEnough) {
  add_picture(folder_.path(), "samples", 7, 400);
  const auto files = pictures_of(folder_.path(), 5);
  ASSERT_EQ(files.size(), 1U);
  EXPECT_EQ(files[0].step, 7);
  const EmbeddedPicture whole = embedded_picture(files[0].path, 10'000'000);
  EXPECT_THAT(whole.address, ::testing::StartsWith("data:image/png;base64,"));
  const EmbeddedPicture small = embedded_picture(files[0].path, 20'000);
  EXPECT_THAT(small.address, ::testing::StartsWith("data:image/jpeg;base64,"));
  EXPECT_LE(small.address.size(), 20'000U * 4 / 3 + 40);
  EXPECT_EQ(small.width, 400);
}

TEST_F(ReportTest, OfManyPicturesTheFirstTheLastAndSomeBetween) {
  for (int64_t step = 1; step <= 9; ++step) add_picture(folder_.path(), "samples", step, 4);
  std::vector<int64_t> steps;
  for (const PictureFile& file : pictures_of(folder_.path(), 3)) steps.push_back(file.step);
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 5, 9));
}

TEST_F(ReportTest, ManyClassesGiveTheCommonestMistakes) {
  std::string header = "label/answer";
  for (int i = 0; i < 31; ++i) header += fmt::format(",c{}", i);
  std::string text = header + "\n";
  for (int i = 0; i < 31; ++i) {
    text += fmt::format("c{}", i);
    for (int k = 0; k < 31; ++k) text += i == k ? ",9" : (i == 3 && k == 4) ? ",7" : ",0";
    text += "\n";
  }
  EXPECT_EQ(confusion_json(csv_rows(text)).dump(), R"({"mistakes":[["c3","c4",7,16]]})");
  for (const char* damaged :
       {"label/answer,a\na,x\n", "label/answer,a\nb,1\n", "label/answer,a\nlabel/answer,1\n",
        "label/answer,a,b\na,0,9223372036854775807\nb,1,0\n"}) {
    EXPECT_TRUE(confusion_json(csv_rows(damaged)).is_null());
  }
}

// ---- train report
// --------------------------------------------------------------------------------

TEST_F(ReportTest, HasWhatTheFolderTells) {
  const fs::path run = add_run("digits");
  add_picture(run, "samples", 20, 8);
  folder_.write("digits/environment.json", R"({"torch": "2.11.0", "hosts": ["a", "b"]})");
  const std::string page = report_page(run);
  EXPECT_EQ(page.find("http-equiv"), page.rfind("http-equiv"));
  const Json data = data_in(page);
  EXPECT_EQ(data["name"], "digits");
  EXPECT_EQ(data["state"], "finished");
  EXPECT_EQ(data["best"]["name"], "test_accuracy");
  EXPECT_EQ(data["epochs"]["step"].dump(), "[20,40,60,80,100]");
  EXPECT_EQ(data["steps"]["loss"].size(), 100U);
  EXPECT_EQ(data["classes"].dump(), R"({"test_accuracy":{"a<b":0.5,"cat":null}})");
  EXPECT_FALSE(data["epochs"].contains("test_accuracy_cat"));
  EXPECT_EQ(data["confusion"].dump(), R"({"classes":["a<b","c,\"d\""],"rows":[[5,1],[0,6]]})");
  EXPECT_EQ(data["pictures"]["samples"][0]["step"], 20);
  EXPECT_EQ(data["environment"]["hosts"][1], "b");
  // Only keys whose values are not the defaults.
  EXPECT_EQ(
      data["settings"].dump(),
      R"([["epochs","5","10"],["batch_size","8","null"],["model.type","digits",null],["data.type","digits",null]])");
}

TEST_F(ReportTest, ShowsClassesByTheirNamesNotByTheLogsKeys) {
  const fs::path run = add_run("run");
  replace_in(run / "log.jsonl", "accuracy_cat", "accuracy_big_cat");
  folder_.write("run/confusion.csv", "label/answer,a<b,big cat\na<b,5,1\nbig cat,0,6\n");
  EXPECT_EQ(data_in(report_page(run))["classes"].dump(),
            R"({"test_accuracy":{"a<b":0.5,"big cat":null}})");
}

TEST_F(ReportTest, ColorsOfClassesAreInTheOrderOfTheirLabels) {
  const fs::path run = add_run("run", {.task = "detection"});
  replace_in(run / "log.jsonl", "accuracy_a<b", "accuracy_10");
  replace_in(run / "log.jsonl", "accuracy_cat", "accuracy_9");
  EXPECT_EQ(data_in(report_page(run))["colors"].dump(),
            R"x([["10","rgb(255,0,0)"],["9","rgb(0,255,0)"]])x");
}

TEST_F(ReportTest, NothingInTheFolderEndsTheScript) {
  const fs::path run = add_run("a&b");
  folder_.write("a&b/environment.json",
                R"({"command": "</script><script>alert(1)</script>", "bad": "\u0000"})");
  const std::string page = report_page(run);
  EXPECT_THAT(page, Not(HasSubstr("alert(1)</script>")));
  EXPECT_THAT(page, HasSubstr("<title>a&amp;b</title>"));
  EXPECT_EQ(data_in(page)["environment"]["command"], "</script><script>alert(1)</script>");
}

TEST_F(ReportTest, OfARunThatTrainsTheBestSoFar) {
  const Json data = data_in(report_page(add_run("run", {.epochs = 4, .is_finished = false})));
  EXPECT_EQ(data["best"]["epoch"], 4);
  EXPECT_EQ(data["best"]["value"], 0.9);
  EXPECT_EQ(data["state"], "no end");  // no process holds the folder's lock
}

TEST_F(ReportTest, OfARunThatTrainsTheBestIsTheOneOfItsBestCheckpoint) {
  const fs::path run = add_run("run", {.best = 0, .is_finished = false});  // all are equal
  EXPECT_EQ(data_in(report_page(run))["best"]["epoch"], 1);
  std::string log = base::read_file(run / "log.jsonl");
  for (const char* loss : {"0.5", "0.25", "0.75", "0.25"}) {
    log.replace(log.find(R"("test_loss":null)"), 16, fmt::format(R"("test_loss":{})", loss));
  }
  folder_.write("run/log.jsonl", log);
  EXPECT_EQ(data_in(report_page(run))["best"]["epoch"], 2);
}

TEST_F(ReportTest, NamesARankThatHoldsUpTheOthersInThreeEpochs) {
  const fs::path run = add_run("slow");
  folder_.write("slow/environment.json", R"({"hosts": [
    {"host": "a", "ranks": [{"rank": 0, "device": "cpu"}, {"rank": 1, "device": "cpu"}]},
    {"host": "b", "ranks": [{"rank": 2, "device": {"address": "0000:dc:00.0"}}]}, 7]})");
  std::string log = base::read_file(run / "log.jsonl");
  const auto stragglers_after = [&](const std::string& own) {
    log += fmt::format(R"({{"event":"step_time","epoch":1,"own":{}}})", own) + "\n";
    folder_.write("slow/log.jsonl", log);
    return data_in(report_page(run))["stragglers"];
  };
  EXPECT_EQ(stragglers_after("[1, 1, 1.4]"), Json::array());
  EXPECT_EQ(stragglers_after("[1, 1.4, 1.4]"), Json::array());  // the median is rank 1's time
  for (int epoch = 0; epoch < 2; ++epoch) {
    EXPECT_EQ(stragglers_after("[1, 1, 1.4]"), Json::array());
  }
  EXPECT_EQ(stragglers_after("[1, 1, 1.4]"),
            Json::parse(R"([{"rank": 2, "host": "b", "gpu": "0000:dc:00.0", "epochs": 3}])"));
  EXPECT_EQ(stragglers_after("[1, 1, 1]"), Json::array());
  EXPECT_EQ(stragglers_after("[1, null]"), Json::array());
}

TEST_F(ReportTest, RefusesWhatIsNoRun) {
  fs::create_directory(folder_ / "empty");
  EXPECT_THAT(refusal([&] { report_page(folder_ / "none"); }), HasSubstr("none is no folder"));
  EXPECT_THAT(refusal([&] { report_page(folder_ / "empty"); }), HasSubstr("empty holds no run"));
  add_run("newer");
  folder_.write("newer/log.jsonl", R"({"event":"start","time":1,"format_version":2})"
                                   "\n");
  EXPECT_THAT(refusal([&] { report_page(folder_ / "newer"); }),
              AllOf(HasSubstr("newer version of train"), HasSubstr("format 2")));
  EXPECT_THAT(refusal([] { report_command({}); }), HasSubstr("name the folder of a run"));
  EXPECT_THAT(refusal([] { report_command({"--all"}); }), HasSubstr("unknown option --all"));
}

TEST_F(ReportTest, OfAVeryLongRunIsSmall) {
  const fs::path run = add_run("long", {.epochs = 500, .steps_per_epoch = 200});
  add_picture(run, "samples", 0, 256);
  const fs::path first = run / "pictures/samples-000000000000.png";
  for (int64_t i = 1; i < 1000; ++i) {
    const char* const name = i % 2 == 0 ? "samples" : "ema_samples";
    fs::create_hard_link(first, run / fmt::format("pictures/{}-{:012}.png", name, i));
  }
  const auto begin = std::chrono::steady_clock::now();
  const std::string page = report_page(run);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(page.size(), kMaxPageBytes);
  const Json data = data_in(page);
  EXPECT_EQ(data["steps"]["step"].back(), 100'000);
  EXPECT_EQ(data["pictures"]["samples"].size(), 16U);
  RecordProperty("seconds", std::to_string(elapsed.count()));
  fmt::print("100000 steps, 1000 pictures: {:.2f} s, {} bytes\n", elapsed.count(), page.size());
}

TEST_F(ReportTest, OfAJobOfManyRanksHasTheSlowestAndIsSmall) {
  constexpr int kRanksOfHost = 8;
  constexpr int kHosts = 2048;
  constexpr int kSlow = 16'000;
  const fs::path run = add_run("large");
  Json hosts = Json::array();
  Json times = {{"event", "step_time"}, {"epoch", 5}, {"step", 100}};
  for (int rank = 0; rank < kHosts * kRanksOfHost; ++rank) {
    if (rank % kRanksOfHost == 0) hosts.push_back({{"host", fmt::format("node{}", hosts.size())}});
    hosts.back()["ranks"].push_back({{"rank", rank}, {"device", {{"uuid", std::string(40, 'x')}}}});
    for (const char* part : {"whole", "data", "forward", "backward", "exchange", "optimizer"}) {
      times[part].push_back(0.0123456789);
    }
    times["own"].push_back(rank == kSlow ? 2.0 : 1.0);
  }
  folder_.write("large/environment.json", Json({{"hosts", hosts}}).dump());
  std::string log = base::read_file(run / "log.jsonl");
  for (int epoch = 0; epoch < 3; ++epoch) log += times.dump() + "\n";
  folder_.write("large/log.jsonl", log);
  const std::string page = report_page(run);
  EXPECT_LT(page.size(), kMaxPageBytes / 4);
  const Json data = data_in(page);
  EXPECT_EQ(data["step_time"]["of_ranks"], kHosts * kRanksOfHost);
  EXPECT_EQ(data["step_time"]["ranks"].back(), kSlow);
  EXPECT_EQ(data["step_time"]["own"].back(), 2.0);
  EXPECT_EQ(data["step_time"]["own"].size(), data["step_time"]["ranks"].size());
  EXPECT_EQ(data["stragglers"][0]["host"], "node2000");
  EXPECT_EQ(data["environment"]["hosts"].back()["host"], "node63");
  EXPECT_EQ(data["environment"]["hosts_not_shown"], kHosts - 64);
}

TEST_F(ReportTest, WriterRenewsAndReportsAFullDiskOnce) {
  const fs::path run = add_run("run");
  { ReportWriter(run).renew(); }
  EXPECT_THAT(base::read_file(run / "report.html"), HasSubstr("</html>"));
  fs::remove(run / "report.html");
  fs::create_symlink("/dev/full", run / "report.html");
  ::testing::internal::CaptureStderr();
  base::init_logging(0);
  {
    ReportWriter writer(run);
    writer.renew();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the first page fails meanwhile
    writer.renew();  // this page is written when the writer closes
  }
  const std::string messages = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(test::count(messages, "no report: "), 1) << messages;
  EXPECT_THAT(messages, AllOf(HasSubstr("No space left"), HasSubstr("; the run goes on")));
}

TEST(MistakesTest, TableNamesClasses) {
  const std::vector<Mistake> mistakes = {{.sample = 7, .label = 1, .answer = 0, .loss = 2.5},
                                         {.sample = 3, .label = 0, .answer = 2, .loss = 1}};
  const auto name_of = [](int64_t sample) { return fmt::format("cats/{}.png", sample); };
  EXPECT_EQ(mistakes_table(mistakes, {"a,b", "cat"}, name_of),
            "sample,label,answer,loss,name\n7,cat,\"a,b\",2.5,cats/7.png\n"
            "3,\"a,b\",2,1,cats/3.png\n");
}

TEST(ContactSheetTest, LabelsAreClassesAndSharesOfMixedOnes) {
  const std::vector<std::string> names = {"cat", "big, dog", "fox"};
  data::Batch batch;
  batch.data = at::zeros({3, 1, 2, 2});
  batch.target = at::tensor({1, 0, -100}, at::kLong);
  EXPECT_EQ(sheet_labels(batch, names), "label\n\"big, dog\"\ncat\n-100\n");
  batch.target = at::tensor({0.25, 0.75, 0.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.25}).view({3, 3});
  EXPECT_EQ(sheet_labels(batch, names),
            "label\n\"big, dog 75 %, cat 25 %\"\nfox\n\"cat 50 %, big, dog 25 %, fox 25 %\"\n");
  batch.target = at::zeros({3, 2, 2}, at::kLong);
  EXPECT_EQ(sheet_labels(batch, names), std::nullopt) << "labels of pixels";
}

// The files that `train` writes for the page.
TEST_F(ReportTest, TrainLeavesAPageWithMistakesFirstBatchAndStepTime) {
  std::vector<std::string> mistakes;
  for (const int ranks : {1, 2}) {
    const fs::path run = folder_ / std::to_string(ranks);
    const auto result = test::run_program(
        {SYNCBN_BIN_DIR "/train", fmt::format("--nproc_per_node={}", ranks), "--config",
         SYNCBN_SOURCE_DIR "/configs/digits.yaml", "--run_dir=" + run.string(), "--epochs=1",
         fmt::format("--batch_size={}", 12 / ranks), "--sampler=distributed",
         "--ddp.broadcast_buffers=true"},
        {.env = {{"OMP_NUM_THREADS", "1"}}});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Json data = data_in(base::read_file(run / "report.html"));
    EXPECT_EQ(data["state"], "finished");
    const Json& first_batch = data["pictures"]["first_batch"][0];
    EXPECT_EQ(first_batch["width"], 8 * (ranks == 1 ? 8 : 6));
    ASSERT_EQ(first_batch["labels"].size(), 12U / static_cast<size_t>(ranks));
    for (const Json& label : first_batch["labels"]) {
      EXPECT_THAT(label.get<std::string>(), ::testing::MatchesRegex("[0-9]"));
    }
    EXPECT_EQ(data["step_time"]["forward"].size(), static_cast<size_t>(ranks));
    for (const char* part : {"whole", "data", "forward", "backward", "optimizer"}) {
      EXPECT_GT(data["step_time"][part][0], 0) << part;
    }
    // A process with libtorch needs at least 50 MB, and this one less than 10 GB.
    const double memory = data["epochs"]["memory_bytes"].back();
    EXPECT_GT(memory, 50e6);
    EXPECT_LT(memory, 10e9);
    double most = 0;
    for (const Json& rank : data["step_time"]["memory_bytes"]) most = std::max<double>(most, rank);
    EXPECT_NEAR(most, memory, 1e-3 * memory) << "the page has rounded numbers";
    for (int rank = 0; ranks > 1 && rank < ranks; ++rank) {
      const double own = data["step_time"]["own"][rank];
      EXPECT_GT(own, 0);
      EXPECT_LT(own, data["step_time"]["whole"][rank]);
    }
    const Json worst = data["mistakes"];
    ASSERT_FALSE(worst.is_null());
    EXPECT_THAT(worst["address"].get<std::string>(), HasSubstr("data:image/png"));
    double former = std::numeric_limits<double>::infinity();
    std::string samples;
    for (const Json& one : worst["list"]) {
      EXPECT_NE(one[1], one[2]);
      const double loss = std::stod(one[3].get<std::string>());
      EXPECT_LE(loss, former);
      former = loss;
      samples += one[0].get<std::string>() + " ";
    }
    mistakes.push_back(samples);
  }
  EXPECT_EQ(mistakes[0].substr(0, 10), mistakes[1].substr(0, 10));
}

TEST_F(ReportTest, ShowsNoTimesOfOtherRanks) {
  const fs::path run = add_run("run", {.is_finished = false});
  const auto add = [&](const std::string& line) {
    folder_.write("run/log.jsonl", base::read_file(run / "log.jsonl") + line + "\n");
  };
  add(R"({"event":"step_time","time":300,"epoch":5,"step":50,"whole":[1,1],"own":[1,1]})");
  EXPECT_FALSE(data_in(report_page(run))["step_time"].is_null());
  add(R"({"event":"start","time":400,"format_version":1,"world_size":2,"step":50})");
  EXPECT_FALSE(data_in(report_page(run))["step_time"].is_null());
  add(R"({"event":"start","time":500,"format_version":1,"world_size":3,"step":50})");
  EXPECT_TRUE(data_in(report_page(run))["step_time"].is_null());
}

TEST_F(ReportTest, TrainLeavesNoPageWhereNoneIsWanted) {
  const auto result = test::run_program(
      {SYNCBN_BIN_DIR "/train", "--config", SYNCBN_SOURCE_DIR "/configs/digits.yaml",
       "--run_dir=" + (folder_ / "run").string(), "--epochs=1", "--report=false"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(fs::exists(folder_ / "run" / "result.json"));
  EXPECT_FALSE(fs::exists(folder_ / "run" / "report.html"));
}

// ---- train compare
// -------------------------------------------------------------------------------

std::string table_of(const std::vector<std::string>& args) {
  ::testing::internal::CaptureStdout();
  const int code = compare_command(args);
  const std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, base::kExitOk);
  return out;
}

TEST_F(ReportTest, CompareShowsKeysThatDifferAndTheBestFirst) {
  const std::string a = add_run("a", {.lr = 0.1, .best = 0.8});
  const std::string b = add_run("b", {.lr = 0.2, .best = 0.9});
  const std::string c = add_run("c", {.lr = 0.4, .epochs = 3, .best = 0.7, .is_finished = false});
  EXPECT_EQ(table_of({a, b, c}),
            "run  epochs  optimizer.lr  best_test_accuracy  best_epoch  test_accuracy  train_loss  "
            "seconds  state\n"
            "  b       5           0.2             90.00 %           5        90.00 %      0.0000  "
            " 10.0 s  finished\n"
            "  a       5           0.1             80.00 %           5        80.00 %      0.0000  "
            " 10.0 s  finished\n"
            "  c       3           0.4             70.00 %           3        70.00 %      0.0000  "
            "  6.0 s  no end\n");
}

TEST_F(ReportTest, CompareShowsTheMetricsOfAllRuns) {
  const auto row = [](const char* name, const char* split) {
    const std::string accuracy = fmt::format("{}_accuracy", split);
    return ResultRow{.values = {name},
                     .result = {{"best_" + accuracy, 0.5}, {"best_epoch", 2}, {accuracy, 0.25}},
                     .state = "finished"};
  };
  EXPECT_EQ(result_table({"run"}, {row("a", "test"), row("b", "val")}),
            "run  best_test_accuracy  best_epoch  test_accuracy  best_val_accuracy  val_accuracy  "
            "seconds  state\n"
            "  a             50.00 %           2        25.00 %                                   "
            "         finished\n"
            "  b                               2                           50.00 %       25.00 %  "
            "         finished\n");
}

TEST_F(ReportTest, CompareShowsTheRanksOnceAndWhatAStoppedRunTook) {
  const std::string a = add_run("a");
  const std::string b = add_run("b", {.epochs = 0, .is_finished = false});
  for (const char* run : {"a", "b"}) {
    std::string config = base::read_file(folder_ / run / "config.yaml");
    for (int i = 0; i < 8; ++i) config += fmt::format("a{}: {}\n", i, run);
    folder_.write(fmt::format("{}/config.yaml", run), config);
  }
  folder_.write("b/log.jsonl", R"({"event":"start","time":1,"format_version":1,"world_size":4})"
                               "\n"
                               R"({"event":"end","time":9,"reason":"SIGTERM","step":1,"seconds":7})"
                               "\n");
  const std::string table = table_of({a, b});
  EXPECT_EQ(test::count(table, "world_size"), 1) << table;
  EXPECT_THAT(table, HasSubstr("7.0 s  stopped by SIGTERM"));
  EXPECT_THAT(table, HasSubstr("\nalso different:\n  a5, a6, a7"));
}

TEST_F(ReportTest, CompareShowsAllOfAnErrorThatThereIsRoomFor) {
  const std::string reason = "an error: rank 1 failed: " + std::string(100, 'x');
  const ResultRow failed{
      .values = {"a"}, .result = Json::object(), .state = "stopped by " + reason};
  EXPECT_THAT(result_table({"run"}, {failed}), HasSubstr("  stopped by " + reason + "\n"));
  EXPECT_THAT(result_table({"run"}, {failed}, 60),
              HasSubstr("  stopped by an error: rank 1 failed: x"));
  EXPECT_THAT(result_table({"run"}, {failed}, 60), HasSubstr("xx…\n"));
  EXPECT_THAT(result_table({"run"}, {failed}, 40),
              HasSubstr("\n  state stopped by " + reason + "\n"))
      << "as a list";
}

TEST_F(ReportTest, WarnsOfALogWithoutAReadableLine) {
  base::init_logging(0);
  const fs::path run = add_run("run");
  for (const char* log : {"", "cut", "no JSON\n"}) {
    folder_.write("run/log.jsonl", log);
    ::testing::internal::CaptureStderr();
    report_page(run);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr("log.jsonl has no readable line: what is shown is from the other files"));
  }
}

TEST_F(ReportTest, CompareShowsWhereLongValuesAndEqualNamesDiffer) {
  const std::string folder = "/data/" + std::string(40, 'x');
  FakeRun run{.init = folder + "/first.pt"};
  const std::string a = add_run("a/same", run);
  run.init = folder + "/other.pt";
  const std::string b = add_run("b/same", run);
  run.init = "/home/" + std::string(40, 'x');
  const std::string c = add_run("c", run);
  const std::string front = table_of({a, b});
  EXPECT_THAT(front, AllOf(HasSubstr("…xxxxxxxxxxxxxx/first.pt "), HasSubstr("/other.pt ")));
  EXPECT_THAT(front, AllOf(HasSubstr(a + " "), HasSubstr(b + " ")));
  EXPECT_THAT(table_of({a, c}),
              AllOf(HasSubstr("…data/xxx"), HasSubstr("…home/xxx"), HasSubstr("\nsame  ")));
}

TEST_F(ReportTest, CompareGroupsSeeds) {
  std::vector<std::string> runs;
  for (int64_t seed = 0; seed < 3; ++seed) {
    runs.push_back(add_run(fmt::format("s{}", seed),
                           {.seed = seed, .best = 0.8 + 0.1 * static_cast<double>(seed - 1)}));
  }
  runs.push_back(add_run("other", {.lr = 0.2, .seed = 0, .best = 0.5}));
  EXPECT_EQ(table_of(runs),
            "          run  optimizer.lr     seed  best_test_accuracy  best_epoch    test_accuracy "
            " train_loss  seconds  state\n"
            "s0 and 2 more           0.1  3 seeds     80.00 ± 10.00 %           5  80.00 ± 10.00 % "
            "     0.0000   10.0 s  finished\n"
            "        other           0.2        0             50.00 %           5          50.00 % "
            "     0.0000   10.0 s  finished\n");
  runs.push_back(add_run("stopped", {.seed = 0, .best = 0.1, .is_finished = false}));
  EXPECT_THAT(table_of(runs),
              AllOf(HasSubstr("s0 and 2 more "), ::testing::ContainsRegex("\n *stopped ")));
}

TEST_F(ReportTest, CompareRefusesWhatCannotBeCompared) {
  const std::string a = add_run("a");
  const std::string b = add_run("b", {.task = "segmentation"});
  EXPECT_THAT(refusal([&] {
                compare_command({a, b});
              }),
              AllOf(HasSubstr("a run of task classification"), HasSubstr("one of segmentation")));
  EXPECT_THAT(refusal([&] { compare_command({a, a + "/"}); }), HasSubstr("is given twice"));
  const std::string empty = folder_ / "empty";
  fs::create_directory(empty);
  EXPECT_THAT(refusal([&] { compare_command({a, empty}); }), HasSubstr("holds no run"));
  EXPECT_THAT(refusal([] { compare_command({}); }), HasSubstr("name the folders of runs"));
  EXPECT_THAT(refusal([&] { compare_command({a, "--htm"}); }), HasSubstr("--htm"));
  EXPECT_EQ(refusal([&] {
              compare_command({a, "--html"});
            }),
            "compare: the option '--html' needs a value");
}

TEST_F(ReportTest, CompareReplacesOnlyItsOwnPages) {
  const std::string a = add_run("a");
  const std::string page = folder_ / "page.html";
  for (int i = 0; i < 2; ++i) EXPECT_EQ(compare_command({a, "--html", page}), 0);
  folder_.write("page.html", "<!doctype html><title>mine</title>");
  EXPECT_THAT(refusal([&] {
                compare_command({a, "--html", page});
              }),
              HasSubstr(page + " is there already, and no page of train; name another file"));
  EXPECT_THAT(base::read_file(page), HasSubstr("mine"));
}

TEST_F(ReportTest, ALogThatIsNoFileEndsNoScript) {
  const fs::path run = add_run("a");
  fs::remove(run / "log.jsonl");
  ASSERT_EQ(::mkfifo((run / "log.jsonl").c_str(), 0600), 0);
  EXPECT_THAT(refusal([&] { report_page(run); }), HasSubstr("log.jsonl: it is not a regular file"));
}

TEST_F(ReportTest, CompareTakesARunAndItsCopyForOne) {
  const fs::path a = add_run("a");
  fs::copy(a, folder_ / "copy");
  const std::string table = table_of({a, (folder_ / "copy").string()});
  EXPECT_THAT(table, HasSubstr(fmt::format("{} is a copy of {}, and left out",
                                           (folder_ / "copy").string(), a.string())));
  EXPECT_THAT(table, Not(HasSubstr("more")));
}

TEST_F(ReportTest, CompareTakesTheFolderOfASweep) {
  add_run("sweep/a", {.lr = 0.1});
  add_run("sweep/b", {.lr = 0.2});
  folder_.write("sweep/sweep.csv", "optimizer.lr\n");
  const std::string table = table_of({(folder_ / "sweep").string()});
  EXPECT_THAT(table, AllOf(HasSubstr("  a  "), HasSubstr("  b  ")));
}

TEST_F(ReportTest, CompareTakesAHundredRuns) {
  std::vector<std::string> args;
  for (int64_t i = 0; i < 100; ++i) {
    args.push_back(
        add_run(fmt::format("r{}", i),
                {.lr = 0.01 * static_cast<double>(1 + i / 5), .seed = i % 5, .epochs = 90}));
  }
  args.push_back("--html=" + (folder_ / "all.html").string());
  const auto begin = std::chrono::steady_clock::now();
  const std::string table = table_of(args);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(std::ranges::count(table, '\n'), 22);  // the last line names the page
  fmt::print("100 runs: {:.2f} s\n", elapsed.count());
}

// ---- in a browser
// --------------------------------------------------------------------------------

std::string browser() {
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"}) {
    const auto found =
        test::run_program({"/bin/sh", "-c", fmt::format("command -v {} || true", name)});
    if (!found.out.empty()) return name;
  }
  return "";
}

struct Opened {
  std::string dom;            ///< after its scripts have run
  std::string messages = {};  ///< from the console
  std::string requests = {};  ///< addresses that it asked for over a network
};

Opened open(const fs::path& page, const fs::path& scratch,
            const std::vector<std::string>& action = {"--dump-dom"}) {
  const fs::path net = scratch / "net.json";
  std::vector<std::string> command = {browser(),
                                      "--headless",
                                      "--no-sandbox",
                                      "--disable-gpu",
                                      "--disable-dev-shm-usage",
                                      "--disable-background-networking",
                                      "--disable-component-update",
                                      "--disable-sync",
                                      "--no-first-run",
                                      "--user-data-dir=" + (scratch / "profile").string(),
                                      "--log-net-log=" + net.string(),
                                      "--enable-logging=stderr",
                                      "--virtual-time-budget=2000"};
  command.insert(command.end(), action.begin(), action.end());
  command.push_back("file://" + page.string());
  const auto result = test::run_program(command);
  Opened opened{.dom = result.out};
  const auto add_matches = [](const std::string& text, const std::string& pattern,
                              std::string& to) {
    const std::regex regex(pattern);
    for (std::sregex_iterator i(text.begin(), text.end(), regex), end; i != end; ++i) {
      to += i->str() + "\n";
    }
  };
  add_matches(result.err, ":CONSOLE[^\n]*", opened.messages);
  // Chromium contacts its own servers, whatever page is open.
  add_matches(
      base::read_file(net),
      R"("url":"(http|ws)s?://(?!(clients2|accounts)\.google\.com/|update\.googleapis\.com/)[^"]*")",
      opened.requests);
  return opened;
}

class PageTest : public ReportTest {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(!browser().empty(), "chromium"); }

  Opened opened(const fs::path& page) const {
    Opened result = open(page, folder_.path());
    EXPECT_EQ(result.messages, "");
    EXPECT_EQ(result.requests, "");
    EXPECT_TRUE(has(result.dom, "</html>"));
    return result;
  }
};

TEST_F(PageTest, ReportOpensWithoutAnErrorOrARequest) {
  const fs::path run = add_run("digits");
  for (int64_t step : {20, 40}) add_picture(run, "samples", step, 64);
  folder_.write("digits/environment.json", R"({"torch": "2.11.0", "hosts": [{"name": "a"}]})");
  folder_.write("digits/precision_recall.csv", "recall,iou_0.50\n0.00,1\n0.50,0.5\n1.00,\n");
  fs::create_directory(run / "profile");
  folder_.write("digits/profile/summary.json",
                R"({"first_step": 11, "steps": 3, "ranks": 2, "step_seconds": 0.01,
      "layers": [{"name": "layer1.0.conv1", "forward": 1e-3, "backward": 2e-3, "exchange": 0, "share": 0.5}],
      "gradients": {"seconds": 4e-3, "hidden_share": 0.75}, "statistics": null,
      "trace": "profile/trace-11-rank-0.json"})");
  const std::string dom = opened(write_report(run)).dom;
  for (const char* heading :
       {">Curves</h2>", ">Profile</h2>", ">Slowest layers</h3>", ">Classes</h2>", ">Pictures</h2>",
        ">Configuration</h2>", ">Environment</h2>", ">Result</h2>", ">Precision over recall</h3>",
        ">Confusion matrix</h3>", ">By class, the worst first</h3>"}) {
    EXPECT_TRUE(has(dom, heading)) << heading;
  }
  EXPECT_TRUE(has(dom, "<canvas"));
  EXPECT_TRUE(has(dom, R"(type="range")"));
  EXPECT_TRUE(has(dom, "IoU ≥ 0.50"));
  EXPECT_TRUE(has(dom, "<code>layer1.0.conv1</code>"));
  EXPECT_TRUE(has(dom, "4\u202fms, 75.0\u202f% hidden"));
}

TEST_F(PageTest, PicturesHaveALegendOfTheirColors) {
  const auto swatch = [](const char* color, const char* name) {
    return fmt::format(
        R"x(<span><span class="swatch area" style="background: rgb({})"></span>{}</span>)x", color,
        name);
  };
  for (const auto& [task, legend] :
       {std::pair{"detection", swatch("255,0,0", "a&lt;b") + swatch("0,255,0", "cat")},
        {"segmentation", "colors\">" + swatch("128,0,0", "cat")}}) {
    const fs::path run = add_run(task, {.task = task});
    add_picture(run, "samples", 20, 64);
    EXPECT_TRUE(has(opened(write_report(run)).dom, legend)) << task;
  }
}

TEST_F(PageTest, ReportThatTrainWroteOpensWithoutAnErrorOrARequest) {
  const fs::path run = folder_ / "run";
  const auto result =
      test::run_program({SYNCBN_BIN_DIR "/train", "--nproc_per_node=2", "--config",
                         SYNCBN_SOURCE_DIR "/configs/digits.yaml", "--run_dir=" + run.string(),
                         "--epochs=2", "--sampler=distributed"},
                        {.env = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string dom = opened(run / "report.html").dom;
  for (const char* part :
       {">Curves</h2>", ">Time and memory of a step</h2>", ">Classes</h2>", ">Worst mistakes</h2>",
        ">Pictures</h2>", ">First training batch, augmented</h3>", ">Configuration</h2>",
        ">Environment</h2>", ">Result</h2>", ">Confusion matrix</h3>", ">Memory</dt>",
        ">optimizer</th>", ">memory</th>"}) {
    EXPECT_TRUE(has(dom, part)) << part;
  }
}

TEST_F(PageTest, KeysMoveTheCursorOfACurve) {
  std::string page = report_page(add_run("digits"));
  const std::string script = R"(<script>
    const area = document.querySelector(".plot");
    for (const key of ["End", "ArrowLeft", "+"]) area.dispatchEvent(new KeyboardEvent("keydown", {key}));
    setTimeout(() => document.title = document.querySelector(".position").textContent + ", of " +
        overSteps.charts.map(({ plot }) => Math.round(plot.scales.x.min)).join(" "), 50);
    </script></body>)";
  page.replace(page.rfind("</body>"), 7, script);
  folder_.write("keys.html", page);
  const std::string dom = opened(folder_ / "keys.html").dom;
  // All charts show the second half.
  const size_t title = dom.find("<title>");
  EXPECT_THAT(dom.substr(title, 80), HasSubstr("step 99, epoch 5, of 50 50 50 50"));
}

TEST_F(PageTest, ThePlacesOfAnAxisHaveDifferentTexts) {
  std::string page = report_page(add_run("digits"));
  const std::string script = R"(<script>
    const textsOf = (name, ...splits) => axisText(name)(null, splits).join("|");
    document.title = [textsOf("memory_bytes", 1.5e9, 1.501e9, null, 1.502e9), textsOf("lr", 1e-5, 1.5e-5),
                      textsOf("step_seconds", 0, 0.5, 1)].join(" and ");
    </script></body>)";
  page.replace(page.rfind("</body>"), 7, script);
  folder_.write("axis.html", page);
  const std::string dom = opened(folder_ / "axis.html").dom;
  const std::string space = "\u202f";
  EXPECT_THAT(dom.substr(dom.find("<title>"), 120),
              HasSubstr(fmt::format("1.5{0}GB|1.501{0}GB||1.502{0}GB and 1e-5|1.5e-5 and "
                                    "0{0}s|500{0}ms|1{0}s",
                                    space)));
}

/// A page with parts that are wider than paper or a phone: charts, classes, a long command.
class WidePageTest : public PageTest {
 protected:
  /// Writes the page with a script at its end, and returns its path.
  fs::path wide_page(const std::string& script) {
    const fs::path run = add_run("wide");
    std::string header = "label/answer";
    std::string rows;
    for (int i = 0; i < 30; ++i) {
      header += fmt::format(",class{}", i);
      rows += fmt::format("class{}", i);
      for (int k = 0; k < 30; ++k) rows += i == k ? ",1234" : ",56";
      rows += "\n";
    }
    folder_.write("wide/confusion.csv", header + "\n" + rows);
    folder_.write(
        "wide/environment.json",
        Json({{"command", "train " + std::string(400, 'x')},
              {"hosts", {{{"host", std::string(60, 'h')}, {"cpu", std::string(90, 'c')}}}}})
            .dump());
    folder_.write("wide/log.jsonl",
                  log_of({}) +
                      R"({"event":"step_time","time":300,"epoch":5,"step":100,"whole":[0.01,0.01],)"
                      R"("data":[0.001,0.001],"forward":[0.003,0.003],"backward":[0.004,0.004],)"
                      R"("exchange":[0.001,0.001],"optimizer":[0.0005,0.0005],"own":[0.008,0.009],)"
                      R"("memory_bytes":[2e8,2e8]})"
                      "\n");
    std::string page = report_page(run);
    page.replace(page.rfind("</body>"), 7, "<script>" + script + "</script></body>");
    return folder_.write("page.html", page);
  }
};

// The page was dark on the screen.
TEST_F(WidePageTest, PrintsInLightColoursWithNothingCutOff) {
  const fs::path page = wide_page(R"(
    matchMedia("print").addEventListener("change", ({ matches }) => {
      if (!matches) return;
      const width = document.documentElement.clientWidth;
      const isCut = (element) => {
        const style = getComputedStyle(element);
        const hides = style.overflowX !== "visible" || style.overflowY !== "visible";
        return element.getBoundingClientRect().right > width + 1 ||
            (hides && (element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1));
      };
      const shown = [...document.querySelectorAll("body *")].filter((element) => element.getBoundingClientRect().width > 0);
      const cut = shown.filter(isCut).map((element) => element.tagName + "." + element.className);
      const { color, backgroundColor } = getComputedStyle(document.body);
      console.log(`printed ${width} pixels wide, ${color} on ${backgroundColor}, ${shown.length > 300 ? "all" : "little"} shown, ` +
                  `cut off: ${[...new Set(cut)].slice(0, 9).join(", ") || "nothing"}.`);
    });)");
  const Opened result = open(page, folder_.path(),
                             {"--window-size=900,900", "--blink-settings=preferredColorScheme=0",
                              "--print-to-pdf=" + (folder_ / "page.pdf").string()});
  EXPECT_THAT(result.messages,
              ::testing::ContainsRegex("printed [67][0-9]+ pixels wide, rgb\\(0, 0, 0\\) on "
                                       "rgb\\(255, 255, 255\\), all shown, cut off: nothing\\."));
  const std::string pdf = base::read_file(folder_ / "page.pdf");
  EXPECT_THAT(pdf, ::testing::StartsWith("%PDF"));
  constexpr int kMaxPages = 8;
  const int pages = test::count(pdf, "/Type /Page\n");
  EXPECT_GE(pages, 1);
  EXPECT_LE(pages, kMaxPages) << "much of the paper is empty";
}

// A Chromium window is at least 500 pixels wide; a frame in it may be narrower.
TEST_F(WidePageTest, FitsAPhoneInLightAndDark) {
  wide_page(R"(
    addEventListener("load", () => setTimeout(() => {
      const root = document.documentElement;
      const isBeyond = (element) => !element.closest(".scroll, pre, .plot") && element.getBoundingClientRect().right > root.clientWidth + 1;
      const beyond = [...document.querySelectorAll("body *")].filter(isBeyond).map((element) => element.tagName + "." + element.className);
      const { color, backgroundColor } = getComputedStyle(document.body);
      console.log(`${root.clientWidth} pixels wide, ${root.scrollWidth} in all, beyond them: ${beyond.slice(0, 9).join(", ") || "nothing"}, ` +
                  `${color} on ${backgroundColor}.`);
    }, 100));)");
  const fs::path phone =
      folder_.write("phone.html",
                    "<html style='color-scheme: light dark'><iframe src='page.html' "
                    "style='width: 390px; height: 800px; border: 0'></iframe></html>");
  for (const auto& [scheme, colors] : {std::pair("0", "217, 222, 228) on rgb(19, 22, 25"),
                                       std::pair("1", "28, 33, 39) on rgb(255, 255, 255")}) {
    const Opened result =
        open(phone, folder_.path(),
             {fmt::format("--blink-settings=preferredColorScheme={}", scheme), "--dump-dom"});
    EXPECT_THAT(
        result.messages,
        AllOf(HasSubstr("375 pixels wide, 375 in all, beyond them: nothing"), HasSubstr(colors)));
  }
}

TEST_F(PageTest, ReportOfARunWithoutAnEpochOpens) {
  const fs::path run = add_run("young", {.epochs = 0, .is_finished = false});
  fs::remove(run / "confusion.csv");
  EXPECT_TRUE(has(opened(write_report(run)).dom, ">Configuration</h2>"));
}

TEST_F(PageTest, ComparisonOpensWithoutAnErrorOrARequest) {
  const std::string a = add_run("a", {.seed = 0, .best = 0.8});
  const std::string b = add_run("b", {.seed = 1, .best = 0.9});
  const std::string c = add_run("c", {.lr = 0.3, .epochs = 3, .is_finished = false});
  table_of({a, b, c, "--html", folder_ / "page.html"});
  const std::string dom = opened(folder_ / "page.html").dom;
  EXPECT_TRUE(has(dom, "<th scope=\"col\" class=\"left\">optimizer.lr</th>"));
  EXPECT_TRUE(has(dom, "a and 1 more</td>"));
  EXPECT_TRUE(has(dom, "<td>85.00 ± 7.07 %</td>"));
  EXPECT_TRUE(has(dom, "<canvas"));
}

// The checks of the tests above detect errors and requests.
TEST_F(PageTest, ABrowserReportsErrorsAndRequests) {
  const std::string page = folder_.write(
      "bad.html", "<html><script>nothing();</script><img src='http://127.0.0.1:9/a.png'></html>");
  const Opened result = open(page, folder_.path());
  EXPECT_THAT(result.messages, HasSubstr("nothing is not defined"));
  EXPECT_THAT(result.requests, HasSubstr("127.0.0.1:9"));
}

}  // namespace
}  // namespace syncbn::train
