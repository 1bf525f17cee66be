// Loads photographs on commands from standard input, and answers each line with a line of JSON.
// bench/data/run.py drives this program and its counterpart in Python (loading.py).
#include <fmt/format.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include <syncbn/base/heap.h>
#include <syncbn/data/loader.h>

#include "../components.h"
#include "support/temp_folder.h"

namespace {

using syncbn::data::Dataset;
using syncbn::data::Loader;
namespace data = syncbn::data;

constexpr int64_t kSize = 224;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Job {
 public:
  Job(const std::string& folder, int64_t batch, int workers)
      : dataset_(syncbn::bench::component<data::DatasetKind>(
                     fmt::format("{{type: image_folder, train: '{0}', test: '{0}', transforms: "
                                 "[{{type: random_resized_crop, size: {1}}}, "
                                 "random_horizontal_flip], cache_dir: '{2}'}}",
                                 folder, kSize, cache_.path().string()))
                     .make(data::Split::kTrain)),
        options_{.batch_size = batch, .num_workers = workers, .shuffle = true},
        loader_(dataset_, options_) {}

  std::string epoch() {
    const double begin = now();
    loader_.start_epoch(epoch_++);
    int64_t images = 0;
    while (const auto batch = loader_.next()) images += batch->size();
    return fmt::format(R"({{"images": {}, "seconds": {}}})", images, now() - begin);
  }

  /// The mean of all values of an epoch.
  std::string look() {
    loader_.start_epoch(0);
    int64_t total = 0;
    while (const auto batch = loader_.next()) total += batch->data.sum().item<int64_t>();
    const int64_t values = 3 * kSize * kSize * dataset_->size();
    return fmt::format(R"({{"mean": {}}})",
                       static_cast<double>(total) / static_cast<double>(values));
  }

  std::string first() const {
    const double begin = now();
    Loader loader(dataset_, options_);
    loader.start_epoch(0);
    const auto batch = loader.next();
    return seconds_since(begin);
  }

  /// Times from an epoch's last batch to the next epoch's first.
  std::string turn() const {
    Loader loader(dataset_, options_);
    loader.start_epoch(0);
    while (loader.next()) {
    }
    const double begin = now();
    loader.start_epoch(1);
    const auto batch = loader.next();
    return seconds_since(begin);
  }

 private:
  static std::string seconds_since(double begin) {
    return fmt::format(R"({{"seconds": {}}})", now() - begin);
  }

  syncbn::test::TempFolder cache_;
  std::shared_ptr<const Dataset> dataset_;
  data::LoaderOptions options_;
  Loader loader_;
  int64_t epoch_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print(stderr, "usage: data_loading FOLDER BATCH WORKERS\n");
    return 2;
  }
  syncbn::base::keep_freed_memory();  // as `train` does
  Job job(argv[1], std::stoll(argv[2]), std::stoi(argv[3]));
  for (std::string command; std::getline(std::cin, command);) {
    const std::string answer = command == "epoch"   ? job.epoch()
                               : command == "look"  ? job.look()
                               : command == "first" ? job.first()
                                                    : job.turn();
    fmt::print("{}\n", answer);
    std::fflush(stdout);
  }
  return 0;
}
