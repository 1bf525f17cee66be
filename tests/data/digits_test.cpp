#include <syncbn/data/digits.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/data/data_files.h>

#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::string kShipped = SYNCBN_SOURCE_DIR "/data/digits.csv.gz";

std::shared_ptr<const Dataset> shipped(Split split, double test_fraction = 0.2) {
  return load_digits({.path = kShipped, .test_fraction = test_fraction}, split);
}

std::vector<int64_t> all_indices(const Dataset& dataset) {
  std::vector<int64_t> indices(static_cast<size_t>(dataset.size()));
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

std::vector<int64_t> counts(const Dataset& dataset) {
  std::vector<int64_t> of_class(static_cast<size_t>(dataset.num_classes()));
  for (const int64_t label : dataset.labels()) ++of_class[static_cast<size_t>(label)];
  return of_class;
}

TEST(DigitsTest, SplitsTheShippedFile) {
  EXPECT_EQ(shipped(Split::kTrain)->size(), 1442);
  EXPECT_EQ(shipped(Split::kTest)->size(), 355);
}

TEST(DigitsTest, HoldsOutAFifthOfEveryClass) {
  const auto train = counts(*shipped(Split::kTrain));
  const auto test = counts(*shipped(Split::kTest));
  for (size_t label = 0; label < 10; ++label) {
    EXPECT_EQ(test[label], (train[label] + test[label]) / 5) << "class " << label;
  }
}

TEST(DigitsTest, ReturnsImagesAndLabelsInTheRequestedOrder) {
  const auto train = shipped(Split::kTrain);
  const std::vector<int64_t> indices = {5, 0, 5};
  const Batch batch = train->get_batch(indices);
  EXPECT_EQ(batch.size(), 3);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 1, 8, 8}));
  EXPECT_EQ(batch.data.scalar_type(), at::kFloat);
  EXPECT_EQ(batch.target.scalar_type(), at::kLong);
  EXPECT_TRUE(batch.data[0].equal(batch.data[2]));
  EXPECT_FALSE(batch.data[0].equal(batch.data[1]));
  EXPECT_EQ(batch.target[0].item<int64_t>(), train->labels()[5]);
  EXPECT_EQ(batch.target[1].item<int64_t>(), train->labels()[0]);
}

TEST(DigitsTest, ReadsTheFirstDigitOfTheFile) {
  // The first line of the file: 0,0,5,13,9,1,0,0, ... ,0
  const Batch batch = shipped(Split::kTrain)->get_batch(std::vector<int64_t>{0});
  const at::Tensor row = batch.data[0][0][0] * 16;
  EXPECT_TRUE(row.equal(at::tensor({0, 0, 5, 13, 9, 1, 0, 0}, at::kFloat)));
  EXPECT_EQ(batch.target.item<int64_t>(), 0);
}

TEST(DigitsTest, ScalesPixelsToTheUnitInterval) {
  const auto train = shipped(Split::kTrain);
  const Batch batch = train->get_batch(all_indices(*train));
  EXPECT_EQ(batch.data.min().item<float>(), 0.0F);
  EXPECT_EQ(batch.data.max().item<float>(), 1.0F);
}

TEST(DigitsTest, ReturnsAnEmptyBatchForNoIndices) {
  const Batch batch = shipped(Split::kTest)->get_batch({});
  EXPECT_EQ(batch.size(), 0);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{0, 1, 8, 8}));
}

TEST(DigitsTest, RefusesAnIndexOutsideTheDataSet) {
  const auto test = shipped(Split::kTest);
  EXPECT_THROW(test->get_batch(std::vector<int64_t>{355}), base::InternalError);
  EXPECT_THROW(test->get_batch(std::vector<int64_t>{-1}), base::InternalError);
}

TEST(DigitsTest, FingerprintDependsOnTheContent) {
  EXPECT_EQ(shipped(Split::kTrain)->fingerprint(), shipped(Split::kTrain)->fingerprint());
  EXPECT_NE(shipped(Split::kTrain)->fingerprint(), shipped(Split::kTest)->fingerprint());
  EXPECT_NE(shipped(Split::kTest)->fingerprint(), shipped(Split::kTest, 0.25)->fingerprint());
}

TEST(DigitsTest, IsRegisteredUnderItsType) {
  const auto dataset = config::Component<DatasetKind>("digits").make(Split::kTest);
  EXPECT_EQ(dataset->fingerprint(), shipped(Split::kTest)->fingerprint());
}

/// Files with digits in a temporary folder.
class DigitsFileTest : public ::testing::Test {
 protected:
  std::string file(const std::string& bytes) {
    const auto path = folder_ / "own.csv";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  /// A line whose pixels are all equal.
  static std::string line(int label, const std::string& pixel = "1") {
    std::string text;
    for (int i = 0; i < 64; ++i) text += pixel + ",";
    return text + std::to_string(label) + "\n";
  }

  static auto message_of(const std::string& path) {
    return [path] { load_digits({.path = path}, Split::kTrain); };
  }

  const test::TempFolder temp_;
  const std::filesystem::path folder_ = temp_.path();
};

TEST_F(DigitsFileTest, ReadsPlainCsvToo) {
  std::string text;
  for (int i = 0; i < 5; ++i) text += line(3);
  EXPECT_EQ(load_digits({.path = file(text)}, Split::kTrain)->size(), 4);
  EXPECT_EQ(load_digits({.path = file(text)}, Split::kTest)->size(), 1);
}

TEST_F(DigitsFileTest, AcceptsWindowsLineEndsAndNoLastNewline) {
  std::string text = line(3);
  text.insert(text.size() - 1, "\r");
  text += line(4);
  text.pop_back();
  EXPECT_THAT(load_digits({.path = file(text)}, Split::kTrain)->labels(), ElementsAre(3, 4));
}

TEST_F(DigitsFileTest, NamesAMissingFile) {
  EXPECT_THAT(
      message_of(folder_ / "none.csv.gz"),
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("none.csv.gz"), HasSubstr("No such file"))));
}

TEST_F(DigitsFileTest, NamesALinkToNothingAndWhatIsNoCsv) {
  std::filesystem::create_symlink("nowhere", folder_ / "link.csv");
  EXPECT_THAT(message_of(folder_ / "link.csv"),
              ThrowsMessage<base::UserError>(
                  HasSubstr("link.csv: it is a link to 'nowhere', which does not exist")));
  EXPECT_THAT(message_of(file("<html>")),
              ThrowsMessage<base::UserError>(HasSubstr("own.csv': it is HTML")));
}

TEST_F(DigitsFileTest, RefusesAFolder) {
  EXPECT_THAT(message_of(folder_), ThrowsMessage<base::UserError>(HasSubstr(folder_.string())));
}

TEST_F(DigitsFileTest, ReportsATruncatedGzipStream) {
  const std::string whole = base::read_file(kShipped);
  for (const size_t length : {size_t{5}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_THAT(message_of(file(whole.substr(0, length))),
                ThrowsMessage<base::UserError>(AllOf(HasSubstr("own.csv"), HasSubstr("cut short"))))
        << length << " bytes";
  }
}

TEST_F(DigitsFileTest, ReportsADamagedGzipStream) {
  std::string bytes = base::read_file(kShipped);
  bytes[bytes.size() / 2] ^= 0x55;
  EXPECT_THAT(message_of(file(bytes)), ThrowsMessage<base::UserError>(HasSubstr("own.csv")));
}

TEST_F(DigitsFileTest, ReportsAnEmptyFile) {
  EXPECT_THAT(message_of(file("")), ThrowsMessage<base::UserError>(
                                        AllOf(HasSubstr("own.csv"), HasSubstr("it is empty"))));
}

TEST_F(DigitsFileTest, ReportsAnEmptySplit) {
  const std::string path = file(line(1) + line(2));
  EXPECT_THAT([&] { load_digits({.path = path}, Split::kTest); },
              ThrowsMessage<base::UserError>(HasSubstr("none of its 2 samples is in the test")));
}

TEST_F(DigitsFileTest, NamesTheLineWithTooFewColumns) {
  EXPECT_THAT(
      message_of(file(line(1) + "1,2,3\n")),
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("own.csv:2:"), HasSubstr("found 3 values"))));
}

TEST_F(DigitsFileTest, NamesTheLineWithTooManyColumns) {
  EXPECT_THAT(
      message_of(file("1," + line(1))),
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("own.csv:1:"), HasSubstr("found 66 values"))));
}

TEST_F(DigitsFileTest, NamesAnEmptyLine) {
  EXPECT_THAT(message_of(file(line(1) + "\n" + line(1))),
              ThrowsMessage<base::UserError>(HasSubstr("own.csv:2:")));
}

TEST_F(DigitsFileTest, NamesAnInvalidPixel) {
  for (const std::string pixel : {"x", "17", "-1", "1.5", "", "nan", "99999999999999999999"}) {
    EXPECT_THAT(message_of(file(line(1) + line(1, pixel))),
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr("own.csv:2: column 1: a pixel must be an integer from 0 to 16"),
                          HasSubstr("'" + pixel + "'"))));
  }
}

// pandas writes 1.0 and True, spreadsheets quotes and a byte order mark.
TEST_F(DigitsFileTest, ReadsNumbersAsToolsWriteThem) {
  for (const std::string pixel : {"1.0", "1e0", " 1", "\"1\"", "true", "True"}) {
    const std::string path = file("\xef\xbb\xbf" + line(1, pixel) + line(1, pixel));
    EXPECT_GT(load_digits({.path = path}, Split::kTrain)->size(), 0) << pixel;
  }
}

TEST_F(DigitsFileTest, NamesAnInvalidLabel) {
  EXPECT_THAT(message_of(file(line(10))),
              ThrowsMessage<base::UserError>(
                  HasSubstr("own.csv:1: column 65: a label must be an integer from 0 to 9")));
}

TEST_F(DigitsFileTest, IsSearchedInTheFolderOfTheEnvironmentFirst) {
  ASSERT_EQ(setenv("SYNCBN_DATA_DIR", folder_.c_str(), /*overwrite=*/1), 0);
  file("");
  EXPECT_EQ(find_data_file("own.csv"), folder_ / "own.csv");
  EXPECT_THAT(
      [] { find_data_file("nothing.csv"); },
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("nothing.csv"), HasSubstr(folder_.string()),
                                           HasSubstr("share/syncbn/data"), HasSubstr("./data"))));
  unsetenv("SYNCBN_DATA_DIR");
}

}  // namespace
}  // namespace syncbn::data
