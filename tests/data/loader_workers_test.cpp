#include <syncbn/data/loader.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <syncbn/base/error.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/image_sets.h>
#include <syncbn/data/sampler.h>

#include "data/components.h"
#include "data/images.h"
#include "data/jpeg_writer.h"
#include "data/noise.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

using test::labels_of;
using test::Noise;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::ThrowsMessage;
using OnError = LoaderOptions::OnError;

/// Reading the samples in `bad` fails.
std::shared_ptr<const Dataset> with_bad(int64_t size, std::set<int64_t> bad) {
  return std::make_shared<Noise>(size, [bad = std::move(bad)](int64_t index) {
    if (bad.contains(index)) throw base::UserError("it is damaged");
  });
}

/// Blocks samples until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

/// All bytes of an epoch, one string per batch.
std::vector<std::string> bytes_of_epoch(Loader& loader) {
  std::vector<std::string> all;
  while (const auto batch = loader.next()) {
    all.emplace_back(static_cast<const char*>(batch->data.const_data_ptr()), batch->data.nbytes());
    for (const int64_t label : labels_of(*batch)) all.back() += fmt::format(" {}", label);
  }
  return all;
}

Loader make(std::shared_ptr<const Dataset> dataset, LoaderOptions options) {
  auto sampler = std::make_shared<DistributedSampler>(
      dataset->size(), DistributedSamplerOptions{.shuffle = false, .seed = 11});
  return Loader(std::move(dataset), std::move(sampler), options);
}

TEST(LoaderWorkersTest, BatchesHaveTheSameBytesForAnyNumberOfWorkers) {
  const auto dataset = std::make_shared<Noise>(103);
  for (const int64_t epoch : {0, 3}) {
    std::vector<std::string> expected;
    for (const int workers : {0, 1, 4, 13}) {
      Loader loader(dataset, std::make_shared<DistributedSampler>(103),
                    {.batch_size = 10, .num_workers = workers});
      loader.start_epoch(epoch);
      const auto epoch_bytes = bytes_of_epoch(loader);
      EXPECT_EQ(epoch_bytes.size(), 11U);
      if (expected.empty()) expected = epoch_bytes;
      EXPECT_EQ(epoch_bytes, expected) << workers << " workers, epoch " << epoch;
    }
  }
}

TEST(LoaderWorkersTest, AugmentedFilesHaveTheSameBytesForAnyNumberOfWorkers) {
  const test::TempFolder folder;
  for (int i = 0; i < 24; ++i) {
    const auto file = folder / fmt::format("train/{}/{}.jpg", i % 3, i);
    std::filesystem::create_directories(file.parent_path());
    folder.write(fmt::format("train/{}/{}.jpg", i % 3, i),
                 test::write_jpeg(test::picture(60 + i, 50 + 2 * i)));
  }
  ImageFolderOptions options;
  options.train = folder / "train";
  options.cache_dir = folder / "cache";
  options.transforms = {test::component("random_resized_crop", {{"size", "16"}}),
                        test::component("random_horizontal_flip"), test::component("rand_augment")};
  const auto dataset = load_image_folder(options, Split::kTrain);
  std::vector<std::vector<std::string>> epochs;
  for (const int workers : {0, 1, 4, 13}) {
    Loader loader = make(dataset, {.batch_size = 5, .num_workers = workers});
    loader.start_epoch(2);
    epochs.push_back(bytes_of_epoch(loader));
    EXPECT_EQ(epochs.back(), epochs.front()) << workers << " workers";
    loader.start_epoch(3);
    EXPECT_NE(bytes_of_epoch(loader), epochs.front());
  }
}

TEST(LoaderWorkersTest, ASlowSampleDelaysNeitherItsBatchNorTheNext) {
  Gate gate;
  // Sample 0 waits for sample 7, which is in the second batch; the order of batches stays the same.
  const auto dataset = std::make_shared<Noise>(8, [&](int64_t index) {
    if (index == 0) gate.pass();
    if (index == 7) gate.open();
  });
  Loader loader = make(dataset, {.batch_size = 4, .num_workers = 2});
  loader.start_epoch(0);
  EXPECT_THAT(labels_of(*loader.next()), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(labels_of(*loader.next()), ElementsAre(4, 5, 6, 7));
  EXPECT_FALSE(loader.next().has_value());
}

TEST(LoaderWorkersTest, MakesAtMostPrefetchBatchesInAdvance) {
  std::atomic<int64_t> made = 0;
  const auto dataset = std::make_shared<Noise>(100, [&](int64_t) { ++made; });
  Loader loader = make(dataset, {.batch_size = 5, .num_workers = 3, .prefetch = 2});
  loader.start_epoch(0);
  const auto first = loader.next();
  const auto second = loader.next();
  // Two returned batches and two in advance. A third one in advance would appear within this time.
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_LE(made, 20);
  }
}

TEST(LoaderWorkersTest, NamesADamagedSampleAndContinuesAfterItsBatch) {
  for (const int workers : {0, 4}) {
    Loader loader = make(with_bad(12, {5, 6}), {.batch_size = 4, .num_workers = workers});
    loader.start_epoch(0);
    EXPECT_THAT(labels_of(*loader.next()), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT([&] { loader.next(); },
                ThrowsMessage<base::UserError>(
                    "sample 5 (file-5): it is damaged (on_error = kSkip leaves such samples out)"));
    EXPECT_THAT(labels_of(*loader.next()), ElementsAre(8, 9, 10, 11));
    EXPECT_FALSE(loader.next().has_value());
  }
}

TEST(LoaderWorkersTest, RethrowsOtherExceptionsUnchanged) {
  const auto dataset =
      std::make_shared<Noise>(4, [](int64_t) { throw base::UnavailableError("the disk is gone"); });
  for (const int workers : {0, 2}) {
    Loader loader = make(
        dataset,
        {.batch_size = 4, .num_workers = workers, .on_error = OnError::kSkip, .error_budget = 1});
    loader.start_epoch(0);
    EXPECT_THAT([&] { loader.next(); }, ThrowsMessage<base::UnavailableError>("the disk is gone"));
  }
}

TEST(LoaderWorkersTest, LeavesDamagedSamplesOutWithinTheBudget) {
  for (const int workers : {0, 4}) {
    Loader loader = make(with_bad(40, {1, 2}),
                         {.batch_size = 4, .num_workers = workers, .on_error = OnError::kSkip});
    loader.start_epoch(0);
    EXPECT_THAT(labels_of(*loader.next()), ElementsAre(0, 3));
    EXPECT_THAT(labels_of(*loader.next()), ElementsAre(4, 5, 6, 7));
    EXPECT_EQ(loader.skipped(), 2);
    EXPECT_EQ(loader.state().consumed, 8);
    loader.start_epoch(1);
    EXPECT_EQ(loader.skipped(), 0);
  }
}

TEST(LoaderWorkersTest, StopsWhenMoreThanTheBudgetIsDamaged) {
  for (const int workers : {0, 4}) {
    Loader loader = make(with_bad(100, {1, 2, 3, 5, 6, 7, 8, 9}), {.batch_size = 4,
                                                                   .num_workers = workers,
                                                                   .on_error = OnError::kSkip,
                                                                   .error_budget = 0.07});
    loader.start_epoch(0);
    loader.next();
    loader.next();
    EXPECT_THAT([&] { loader.next(); },
                ThrowsMessage<base::UserError>(
                    "8 of 100 samples could not be read, more than the 7 that error_budget (7 %) "
                    "allows; mend or remove the files that the warnings name, or raise "
                    "error_budget"));
  }
}

TEST(LoaderWorkersTest, TheBudgetIsOfAllRanksTogether) {
  // 40 % of 20 samples are 8, and one rank has 10 samples.
  const auto skipped_of = [](std::set<int64_t> bad) {
    Loader loader(with_bad(20, std::move(bad)), std::make_shared<SequentialShardSampler>(20, 2, 0),
                  {.batch_size = 10, .on_error = OnError::kSkip, .error_budget = 0.4});
    loader.start_epoch(0);
    while (loader.next()) {
    }
    return loader.skipped();
  };
  EXPECT_EQ(skipped_of({0, 2, 4, 6, 8, 10, 12, 14}), 8);
  EXPECT_THROW(skipped_of({0, 2, 4, 6, 8, 10, 12, 14, 16}), base::UserError);
}

TEST(LoaderWorkersTest, OfAFewSamplesMoreThanTheBudgetMayBeDamaged) {
  EXPECT_EQ(max_skipped({}, 1000), 50);
  EXPECT_EQ(max_skipped({.error_budget = 0.29}, 100), 29);
  EXPECT_EQ(max_skipped({}, 40), 5);
  EXPECT_EQ(max_skipped({}, 8), 4);
  EXPECT_EQ(max_skipped({}, 1), 0);
  EXPECT_EQ(max_skipped({.error_budget = 0}, 1000), 0);
}

/// With any budget, an epoch needs a sample.
TEST(LoaderWorkersTest, AnEpochWithoutAnySampleIsAnError) {
  const LoaderOptions options{.batch_size = 2,
                              .on_error = OnError::kSkip,
                              .empty_batches = true,
                              .error_budget = 1,
                              .sample_name = "training sample"};
  EXPECT_EQ(max_skipped(options, 4), 3);
  EXPECT_EQ(max_skipped(options, 0), 0);
  EXPECT_NO_THROW(check_skipped(options, 0, 0));
  EXPECT_NO_THROW(check_skipped(options, 3, 4));
  Loader loader = make(with_bad(4, {0, 1, 2, 3}), options);
  loader.start_epoch(0);
  EXPECT_EQ(loader.next()->size(), 0);
  EXPECT_THAT([&] { loader.next(); },
              ThrowsMessage<base::UserError>("none of 4 training samples could be read; mend or "
                                             "replace the files that the warnings name"));
  EXPECT_THAT([&] { check_skipped(options, 1, 1); },
              ThrowsMessage<base::UserError>("the only training sample could not be read; mend or "
                                             "replace the file that the warning names"));
  EXPECT_THAT(
      [&] { refuse_empty_epoch(options, 2); },
      ThrowsMessage<base::UserError>(HasSubstr("none of 2 training samples could be read")));
}

TEST(LoaderWorkersTest, CollectsDamagedSamplesWithoutABudget) {
  for (const int workers : {0, 4}) {
    Loader loader = make(with_bad(3, {0, 1, 2}), {.batch_size = 2,
                                                  .num_workers = workers,
                                                  .on_error = OnError::kCollect,
                                                  .error_budget = 0});
    loader.start_epoch(0);
    ::testing::internal::CaptureStdout();  // where spdlog's default logger writes
    EXPECT_EQ(loader.next()->size(), 0);
    EXPECT_EQ(loader.next()->size(), 0);
    EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
    EXPECT_FALSE(loader.next().has_value());
    EXPECT_THAT(loader.damaged(), ElementsAre(Pair(0, "sample 0 (file-0): it is damaged"),
                                              Pair(1, "sample 1 (file-1): it is damaged"),
                                              Pair(2, "sample 2 (file-2): it is damaged")));
  }
}

TEST(LoaderWorkersTest, RefusesABatchWithoutAnySampleLeft) {
  Loader loader =
      make(with_bad(4, {0, 1}), {.batch_size = 2, .on_error = OnError::kSkip, .error_budget = 1});
  loader.start_epoch(0);
  EXPECT_THAT([&] { loader.next(); },
              ThrowsMessage<base::UserError>(HasSubstr("no sample of a batch")));
  Loader empty =
      make(with_bad(4, {0, 1}),
           {.batch_size = 2, .on_error = OnError::kSkip, .empty_batches = true, .error_budget = 1});
  empty.start_epoch(0);
  EXPECT_EQ(empty.next()->size(), 0);
  EXPECT_EQ(empty.next()->size(), 2);
  EXPECT_EQ(empty.skipped(), 2);
}

TEST(LoaderWorkersTest, EpochsAndLoadersMayEndEarly) {
  const auto dataset = std::make_shared<Noise>(100);
  Loader reference = make(dataset, {.batch_size = 7});
  reference.start_epoch(6);
  const auto expected = bytes_of_epoch(reference);
  Loader loader = make(dataset, {.batch_size = 7, .num_workers = 4, .prefetch = 5});
  for (int64_t epoch = 0; epoch < 6; ++epoch) {
    loader.start_epoch(epoch);
    for (int64_t i = 0; i < epoch; ++i) loader.next();
  }
  loader.start_epoch(6);
  EXPECT_EQ(bytes_of_epoch(loader), expected);
  loader.start_epoch(7);
}

/// Calls next() again after each timeout: a busy machine may need longer.
std::optional<Batch> next_however_long(Loader& loader) {
  while (true) {
    try {
      return loader.next();
    } catch (const base::UnavailableError&) {
    }
  }
}

TEST(LoaderWorkersTest, NamesTheSampleThatTakesTooLong) {
  Gate gate;
  const auto dataset = std::make_shared<Noise>(6, [&](int64_t index) {
    if (index == 4) gate.pass();
  });
  Loader loader =
      make(dataset, {.batch_size = 3, .num_workers = 2, .timeout = std::chrono::milliseconds(20)});
  loader.start_epoch(0);
  // On a busy machine even the first batch, which does not hang, may time out.
  std::string message;
  while (message.find("file-4") == std::string::npos) {
    try {
      loader.next();
    } catch (const base::UnavailableError& error) {
      message = error.what();
    }
  }
  EXPECT_THAT(message, AllOf(HasSubstr("no batch for 20 ms"), HasSubstr("sample 4 (file-4)")));
  gate.open();
  EXPECT_THAT(labels_of(*next_however_long(loader)), ElementsAre(3, 4, 5));
}

TEST(LoaderWorkersTest, ALoaderIsDestroyedAfterATimeoutThoughASampleHangs) {
  Gate gate;
  std::atomic<bool> hangs = false;
  std::weak_ptr<Noise> used_by_worker;
  {
    auto dataset = std::make_shared<Noise>(6, [&](int64_t index) {
      if (index != 4 || hangs.exchange(true)) return;
      hangs.notify_one();
      gate.pass();
    });
    used_by_worker = dataset;
    Loader loader(std::move(dataset),
                  {.batch_size = 6, .num_workers = 2, .timeout = std::chrono::milliseconds(20)});
    loader.start_epoch(0);
    hangs.wait(false);
    EXPECT_THROW(loader.next(), base::UnavailableError);
    // The other thread reads on.
    loader.start_epoch(1);
    EXPECT_EQ(next_however_long(loader)->size(), 6);
  }
  EXPECT_FALSE(used_by_worker.expired());
  gate.open();
  while (!used_by_worker.expired()) std::this_thread::yield();
}

TEST(LoaderWorkersTest, ReusesMemoryExceptOfBatchesInUse) {
  Loader loader = make(std::make_shared<Noise>(20), {.batch_size = 4, .num_workers = 3});
  loader.start_epoch(0);
  const Batch kept = *loader.next();
  const at::Tensor copy = kept.data.clone();
  std::set<const void*> places;
  for (int64_t epoch = 1; epoch < 20; ++epoch) {
    loader.start_epoch(epoch);
    while (const auto batch = loader.next()) places.insert(batch->data.const_data_ptr());
  }
  EXPECT_FALSE(places.contains(kept.data.const_data_ptr()));
  EXPECT_TRUE(kept.data.equal(copy));
  // One in use, two in advance, and those that workers still hold at the end of an epoch.
  EXPECT_LE(places.size(), 6U);
}

TEST(LoaderWorkersTest, KeepsItsThreadsForAllEpochs) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  const auto dataset = std::make_shared<Noise>(64, [&](int64_t) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  Loader loader = make(dataset, {.batch_size = 8, .num_workers = 3});
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    loader.start_epoch(epoch);
    bytes_of_epoch(loader);
  }
  EXPECT_LE(threads.size(), 3U);
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
}

TEST(LoaderWorkersTest, ResumesWithoutReadingEarlierSamples) {
  std::mutex mutex;
  std::set<int64_t> read;
  const auto dataset = std::make_shared<Noise>(60, [&](int64_t index) {
    const std::lock_guard lock(mutex);
    read.insert(index);
  });
  Loader first = make(dataset, {.batch_size = 6, .num_workers = 4});
  first.start_epoch(3);
  for (int i = 0; i < 7; ++i) first.next();
  const SamplerState state = first.state();
  const auto expected = bytes_of_epoch(first);
  read.clear();
  for (const int workers : {0, 4}) {
    Loader resumed = make(dataset, {.batch_size = 6, .num_workers = workers});
    resumed.resume(state);
    EXPECT_EQ(bytes_of_epoch(resumed), expected);
  }
  EXPECT_EQ(read.size(), 18U);
  EXPECT_EQ(*read.begin(), 42);
}

TEST(LoaderWorkersTest, RepeatedSamplesAreAugmentedDifferently) {
  Loader loader(std::make_shared<Noise>(4),
                std::make_shared<RepeatedAugmentationSampler>(
                    4,
                    RepeatedAugmentationSamplerOptions{
                        .shuffle = false, .repetitions = 2, .selected_round = 0}),
                {.batch_size = 4});
  loader.start_epoch(0);
  const Batch batch = *loader.next();
  EXPECT_THAT(labels_of(batch), ElementsAre(0, 0, 1, 1));
  EXPECT_FALSE(batch.data[0].equal(batch.data[1]));
}

TEST(LoaderWorkersTest, MeasuresTheWaitForData) {
  Loader loader = make(std::make_shared<Noise>(4), {.batch_size = 4});
  EXPECT_EQ(loader.wait_seconds(), 0);
  loader.start_epoch(0);
  loader.next();
  EXPECT_GT(loader.wait_seconds(), 0);
}

}  // namespace
}  // namespace syncbn::data
