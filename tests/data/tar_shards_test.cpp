#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/data/image_ops.h>
#include <syncbn/data/image_sets.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/shard_sampler.h>

#include "data/components.h"
#include "data/images.h"
#include "data/spoiled_index.h"
#include "index/index_file.h"
#include "sets/file_bytes.h"
#include "sets/shard_index.h"
#include "sets/tar_index.h"
#include "support/program.h"
#include "support/python.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

auto refuses(const std::string& what, const std::string& why) {
  return ThrowsMessage<base::UserError>(AllOf(HasSubstr(what), HasSubstr(why)));
}

/// A member of a tar file, with a valid checksum.
std::string member(const std::string& name, const std::string& bytes, char type = '0') {
  std::string block(512, '\0');
  block.replace(0, name.size(), name);
  block.replace(100, 7, "0000644");
  block.replace(124, 11, fmt::format("{:011o}", bytes.size()));
  block[156] = type;
  block.replace(257, 8, std::string("ustar\00000", 8));
  block.replace(148, 8, "        ");
  int sum = 0;
  for (const char c : block) sum += static_cast<unsigned char>(c);
  block.replace(148, 7, fmt::format("{:06o}", sum) + '\0');
  return block + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
}

const std::string kEnd(1024, '\0');

class TarShardsTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Dataset> load(const std::string& pattern) const {
    TarShardsOptions options;
    options.train = folder_ / pattern;
    options.cache_dir = folder_ / "cache";
    options.classes = 10;
    options.transforms = {test::component("center_crop", {{"size", "8"}})};
    return load_tar_shards(options, Split::kTrain);
  }
  std::shared_ptr<const Dataset> load_bytes(const std::string& bytes) const {
    folder_.write("a.tar", bytes);
    return load("a.tar");
  }
  /// Reads the headers of all members, without an index.
  void scan(const std::string& bytes) const {
    const std::string path = folder_.write("b.tar", bytes);
    detail::for_each_tar_member(base::open_regular_file(path), path,
                                [](const detail::TarMember&) {});
  }

  const std::string image_ = base::read_file(test::kImages / "png_rgb8.png");
  const test::TempFolder folder_;
};

TEST_F(TarShardsTest, ReadsSamplesOfAllShards) {
  folder_.write("s-08.tar", member("x/1.jpg", image_) + member("x/1.cls", "3\n") +
                                member("x/1.json", "{}") + member("x/2.cls", "4") +
                                member("x/2.png", image_) + kEnd);
  folder_.write("s-09.tar", member("dir/", "", '5') + member("v1.2/3.seg.jpg", "not the image") +
                                member("v1.2/4.jpg", image_) + member("v1.2/4.cls", "5"));
  const auto set = load("s-{08..09}.tar");
  EXPECT_THAT(set->labels(), ElementsAre(3, 4, 5));
  const Batch batch = set->get_batch(std::vector<int64_t>{0, 1, 2});
  const Image expected = crop(ImageDecoder(test::bytes_of(image_), "a").decode(), {2, 2, 8, 8});
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(batch.data[i][0][0][0].item<int>(), expected.pixels[0]);
    EXPECT_EQ(batch.data[i][2][7][7].item<int>(), expected.pixels.back());
  }
}

constexpr const char* kTarfileScript = R"(
import io, sys, tarfile
folder, image = sys.argv[1], open(sys.argv[2], "rb").read()
for name, form in (("ustar", tarfile.USTAR_FORMAT), ("gnu", tarfile.GNU_FORMAT), ("pax", tarfile.PAX_FORMAT)):
    with tarfile.open(f"{folder}/{name}.tar", "w", format=form) as tar:
        for i in range(4):
            key = "d" * 90 + "/" + "k" * (60 if name == "ustar" else 180) + str(i)
            for extension, data in ((".jpg", image), (".cls", str(i).encode())):
                info = tarfile.TarInfo(key + extension)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
)";

TEST_F(TarShardsTest, ReadsEveryFormatThatPythonWrites) {
  const auto result = test::run_program({test::python(), "-c", kTarfileScript,
                                         folder_.path().string(), test::kImages / "png_rgb8.png"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* name : {"ustar.tar", "gnu.tar", "pax.tar"}) {
    const auto set = load(name);
    EXPECT_THAT(set->labels(), ElementsAre(0, 1, 2, 3)) << name;
    EXPECT_EQ(set->get_batch(std::vector<int64_t>{3}).size(), 1);
  }
}

TEST_F(TarShardsTest, RefusesUnsafeMembers) {
  const auto refuse = [&](const std::string& bytes, const std::string& name,
                          const std::string& why) {
    EXPECT_THAT([&] { load_bytes(bytes + kEnd); },
                AllOf(refuses("a.tar", why), refuses(name, why)));
  };
  refuse(member("../1.jpg", image_), "../1.jpg", "'..'");
  refuse(member("a/../../1.jpg", image_), "a/../../1.jpg", "'..'");
  refuse(member("/etc/1.jpg", image_), "/etc/1.jpg", "absolute");
  refuse(member("1.jpg", "", '1'), "1.jpg", "link");
  refuse(member("1.jpg", "", '2'), "1.jpg", "link");
  refuse(member("1.jpg", "", '3'), "1.jpg", "neither a file nor a folder");
  // Long names are checked as well.
  refuse(member("x", "../" + std::string(200, 'a') + ".jpg", 'L') + member("1.jpg", image_), "../",
         "'..'");
  refuse(member("x", "15 path=/1.jpg\n", 'x') + member("1.jpg", image_), "/1.jpg", "absolute");
  refuse(member("x", "11 size=-1\n", 'x') + member("1.jpg", image_), "x",
         "is negative or not a number");
}

TEST_F(TarShardsTest, LeavesOutHiddenFilesAndNamesWithoutExtension) {
  // In the middle of a sample, as macOS's tar writes them.
  for (const char* const name : {"", "./", "v1.2/"}) {
    const std::string folder = name;
    const auto set = load_bytes(member(folder + "._1.jpg", "x") + member(folder + "1.jpg", image_) +
                                member(folder + "LICENSE", "x") + member(folder + "._1.cls", "x") +
                                member(folder + "1.cls", "3") + kEnd);
    EXPECT_THAT(set->labels(), ElementsAre(3)) << folder;
  }
}

TEST_F(TarShardsTest, ReadsExtensionsInCapitals) {
  const auto set = load_bytes(member("1.PNG", image_) + member("1.Cls", "3") +
                              member("2.JPG", image_) + member("2.CLS", "4") + kEnd);
  EXPECT_THAT(set->labels(), ElementsAre(3, 4));
}

TEST_F(TarShardsTest, CountsMembersWhoseNamesHaveSeveralDots) {
  const std::string other = member("b1.5_0.jpg", image_) + member("b1.5_0.cls", "1") +
                            member("b1.6_0.jpg", image_) + member("b1.6_0.cls", "2");
  const auto remark = [](const Dataset& set) {
    const auto all = set.remarks();
    return all.empty() ? "" : all.front().text;
  };
  const std::string sample = member("1.jpg", image_) + member("1.cls", "3");
  const auto set = load_bytes(sample + other + kEnd);
  EXPECT_THAT(set->labels(), ElementsAre(3));
  EXPECT_THAT(remark(*set),
              AllOf(HasSubstr("a.tar': left out: 4 files (2 .cls, 2 .jpg), such as 'b1.5_0.cls'"),
                    HasSubstr("named alike up to the first dot")));
  EXPECT_EQ(remark(*load("a.tar")), remark(*set)) << "from the index";
  EXPECT_THAT([&] { load_bytes(other + kEnd); },
              refuses("there is no sample in", "but 4 files (2 .cls, 2 .jpg), such as"));
  // A second label beside a sample's own, but not another field of the sample.
  const auto beside = load_bytes(sample + member("1.seg.png", image_) + member("2.jpg", image_) +
                                 member("2.cls", "4") + member("2.5.cls", "4") + kEnd);
  EXPECT_THAT(beside->labels(), ElementsAre(3, 4));
  EXPECT_THAT(remark(*beside), HasSubstr("1 file (.cls), such as '2.5.cls'"));
  EXPECT_EQ(remark(*load_bytes(sample + member("1.seg.png", image_) + kEnd)), "");
  EXPECT_THAT(remark(*load_bytes(sample + member("2.gif", "GIF89a and so on") + kEnd)),
              HasSubstr("1 file (.gif), such as '2.gif': the files of a sample"));
}

TEST_F(TarShardsTest, TakesImagesByTheirContentWhateverTheirNames) {
  const auto set =
      load_bytes(member("1.jfif", image_) + member("1.cls", "3") + member("2.cls", "4") +
                 member("2.img", image_) + member("3.mask", image_) + member("3.jpg", "no image") +
                 member("3.cls", "5") + kEnd);
  EXPECT_THAT(set->labels(), ElementsAre(3, 4, 5));
  EXPECT_EQ(set->get_batch(std::vector<int64_t>{0, 1}).size(), 2);
  EXPECT_THROW(set->get_batch(std::vector<int64_t>{2}), base::UserError) << "a name comes first";
  EXPECT_THAT([&] { load_bytes(member("1.cls", "3") + member("1.webp", "RIFF1234WEBP") + kEnd); },
              refuses("there is no sample in", "but 1 file (.webp), such as '1.webp'"));
}

TEST_F(TarShardsTest, ReadsLabelsAsToolsWriteThem) {
  for (const std::string label : {"3.0", "\"3\"",
                                  "\xef\xbb\xbf"
                                  "3\r\n",
                                  " 3"}) {
    EXPECT_THAT(load_bytes(member("1.jpg", image_) + member("1.cls", label) + kEnd)->labels(),
                ElementsAre(3))
        << label;
  }
}

TEST_F(TarShardsTest, SaysThatTheOtherPartOfASampleIsElsewhere) {
  const auto refuse = [&](const std::string& bytes, const std::string& other) {
    EXPECT_THAT([&] { load_bytes(bytes + kEnd); },
                refuses(fmt::format("; '{}' is elsewhere in the shard", other), "--sort=name"));
  };
  const std::string second = member("2.jpg", image_) + member("2.cls", "1");
  refuse(member("1.jpg", image_) + second + member("1.cls", "1"), "1.cls");
  refuse(member("1.cls", "1") + second + member("1.png", image_), "1.png");
  refuse(member("images/1.jpg", image_) + member("labels/1.cls", "1"), "labels/1.cls");
}

TEST_F(TarShardsTest, RefusesIncompleteSamples) {
  const auto refuse = [&](const std::string& bytes, const std::string& why) {
    EXPECT_THAT([&] { load_bytes(bytes + kEnd); }, refuses("a.tar", why));
  };
  refuse(member("1.jpg", image_), "no .cls");
  refuse(member("1.cls", "1") + member("2.jpg", image_), "no image");
  refuse(member("1.jpg", image_) + member("1.cls", "10"), "from 0 to 9");
  refuse(member("1.jpg", image_) + member("1.cls", "cat"), "from 0 to 9");
  refuse(member("1.txt", "x"), "no sample");
}

TEST_F(TarShardsTest, RefusesDamagedArchives) {
  const std::string whole = member("1.jpg", image_) + member("1.cls", "1") + kEnd;
  EXPECT_THAT([&] { load_bytes(""); }, refuses("a.tar'", "it is empty"));
  EXPECT_THAT([&] { load_bytes(whole.substr(0, 300)); }, refuses("a.tar", "cut short"));
  EXPECT_THAT([&] { load_bytes(whole.substr(0, 700)); }, refuses("a.tar", "cut short"));
  std::string damaged = whole;
  damaged[5] = 'x';
  EXPECT_THAT([&] { load_bytes(damaged); }, refuses("a.tar", "damaged"));
  for (size_t at = 0; at < 512; ++at) {
    if (at == 155) continue;  // the byte after the checksum's terminator
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x41);
    EXPECT_THROW(scan(changed), base::UserError) << at;
  }
}

TEST_F(TarShardsTest, ReadsConcatenatedArchives) {
  const std::string first = member("1.jpg", image_) + member("1.cls", "3") + kEnd;
  const std::string second = member("2.jpg", image_) + member("2.cls", "4");
  const auto set = load_bytes(first + second + kEnd);
  EXPECT_THAT(set->labels(), ElementsAre(3, 4));
  EXPECT_TRUE(set->remarks().empty());
  EXPECT_EQ(load_bytes(first + second)->remarks().size(), 1U) << "the second one is not closed";
  EXPECT_TRUE(load_bytes(first + std::string(100, '\0'))->remarks().empty());
  EXPECT_THAT(load_bytes(first + std::string(512, 'x'))->labels(), ElementsAre(3));
}

/// "syscr": read system calls of this process so far; "rchar": the bytes that they read. Always -1
/// if the kernel does not count them: a test then sees only what was read.
int64_t io_count(const std::string& name) {
  std::ifstream counts("/proc/self/io");
  int64_t number = -1;
  for (std::string word; counts >> word;) {
    if (word == name + ":") counts >> number;
  }
  return number;
}

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> found;
  const bool is_closed =
      detail::for_each_tar_member(base::open_regular_file(path), path,
                                  [&](const auto& member) { found.push_back(member.name); });
  EXPECT_TRUE(is_closed);
  return found;
}

TEST_F(TarShardsTest, ReadsTheZerosAfterAnArchiveInLargePieces) {
  constexpr int64_t kMiB = 1 << 20;
  const std::string first = member("1.jpg", image_) + member("1.cls", "3");
  const std::string second = member("2.jpg", image_) + member("2.cls", "4");
  const std::string path = folder_.write("b.tar", first);
  // The last piece is shorter, and no multiple of a block.
  std::filesystem::resize_file(path, 64 * kMiB + 100);
  const int64_t before = io_count("syscr");
  EXPECT_THAT(names_in(path), ElementsAre("1.jpg", "1.cls"));
  EXPECT_LT(io_count("syscr") - before, 1000) << "the file has 131072 blocks";
  // Another archive begins in the middle of a piece.
  std::ofstream(path, std::ios::app | std::ios::binary)
      << std::string(512 - 100, '\0') << second << kEnd;
  EXPECT_THAT(names_in(path), ElementsAre("1.jpg", "1.cls", "2.jpg", "2.cls"));
}

TEST_F(TarShardsTest, ReadsLittleAheadAfterEachOfManyArchives) {
  constexpr size_t kArchives = 500;
  constexpr int64_t kMost = kArchives * 64 * 1024;
  std::string bytes;
  for (size_t i = 0; i < kArchives; ++i) bytes += member(fmt::format("{}.cls", i), "3") + kEnd;
  const std::string path = folder_.write("b.tar", bytes);
  const int64_t before = io_count("rchar");
  EXPECT_THAT(names_in(path), SizeIs(kArchives));
  EXPECT_LT(io_count("rchar") - before, kMost) << "the file has " << bytes.size() << " bytes";
}

TEST_F(TarShardsTest, ReadsMembersAfterALoneBlockOfZeros) {
  const std::string zeros(512, '\0');
  const std::string path =
      folder_.write("b.tar", member("1.jpg", image_) + zeros + member("1.cls", "3") + zeros +
                                 member("2.jpg", image_) + member("2.cls", "4") + kEnd);
  EXPECT_THAT(names_in(path), ElementsAre("1.jpg", "1.cls", "2.jpg", "2.cls"));
}

/// As tar does.
TEST_F(TarShardsTest, IgnoresACutHeaderAfterTheEnd) {
  const std::string whole = member("1.jpg", image_) + member("1.cls", "3") + kEnd;
  for (const size_t zeros : {size_t{0}, size_t{512}, size_t{50} << 10}) {
    const std::string path = folder_.write(
        "b.tar", whole + std::string(zeros, '\0') + member("2.jpg", image_).substr(0, 300));
    EXPECT_THAT(names_in(path), ElementsAre("1.jpg", "1.cls")) << zeros;
  }
}

TEST_F(TarShardsTest, SaysWhatAFileIsThatIsNoShard) {
  EXPECT_THAT([&] { load_bytes("\x1f\x8b\x08" + std::string(600, 'x')); },
              refuses("a.tar'", "it is a compressed file: unpack it with `gzip -dc"));
  const std::string first = member("<1.jpg", image_);
  EXPECT_THAT([&] { load_bytes(first.substr(0, 150) + "x" + first.substr(151)); },
              refuses("a.tar'", "it is not a tar file, or damaged"));
  std::filesystem::remove(folder_ / "a.tar");
  std::filesystem::create_symlink("nowhere", folder_ / "a.tar");
  EXPECT_THAT([&] { load("a.tar"); },
              refuses("a.tar", "it is a link to 'nowhere', which does not exist"));
}

TEST_F(TarShardsTest, NamesShardsWithoutClosingBlocks) {
  const std::string sample = member("1.jpg", image_) + member("1.cls", "3");
  for (const char* name : {"s-0.tar", "s-1.tar", "s-2.tar"}) folder_.write(name, sample);
  folder_.write("s-0.tar", sample + kEnd.substr(0, 512));  // nothing is lost
  for (const char* const from : {"the shards", "the index"}) {
    const auto remarks = load("s-{0..2}.tar")->remarks();
    ASSERT_EQ(remarks.size(), 1U) << from;
    EXPECT_FALSE(remarks[0].is_fault);
    EXPECT_THAT(remarks[0].text,
                AllOf(HasSubstr("s-{0..2}.tar': shards without the closing blocks of a tar "
                                "file: 2 files (.tar), such as '"),
                      HasSubstr("s-1.tar': they may be cut short; compare their sizes with "
                                "those of the originals")));
  }
  for (const char* name : {"s-1.tar", "s-2.tar"}) folder_.write(name, sample + kEnd);
  EXPECT_TRUE(load("s-{0..2}.tar")->remarks().empty());
  // Cut between the members of a sample.
  EXPECT_THAT([&] { load_bytes(sample + member("2.jpg", image_)); },
              refuses("it has an image and no .cls", "or the shard is cut short"));
}

TEST_F(TarShardsTest, MakesAnIndexAnewIfItsArraysDoNotFitTheShards) {
  const std::string first = member("1.jpg", image_) + member("1.cls", "3") +
                            member("2.jpg", image_) + member("2.cls", "4") + kEnd;
  folder_.write("s-0.tar", first);
  folder_.write("s-1.tar", member("3.jpg", image_) + member("3.cls", "5") + kEnd);
  load("s-{0,1}.tar");
  constexpr size_t kSections = 4;
  int spoiled = 0;
  for (size_t section = 1; section <= kSections; ++section) {
    for (size_t word = 0; test::spoil_index(folder_ / "cache", section, word); ++word) {
      const auto set = load("s-{0,1}.tar");
      EXPECT_THAT(set->labels(), ElementsAre(3, 4, 5))
          << "word " << word << " of section " << section;
      EXPECT_EQ(set->get_batch(std::vector<int64_t>{0, 1, 2}).size(), 3);
      ++spoiled;
    }
  }
  EXPECT_GT(spoiled, 15);
}

TEST_F(TarShardsTest, NamesTheShardOfADamagedImage) {
  const auto set = load_bytes(member("1.jpg", "no image") + member("1.cls", "1") + kEnd);
  EXPECT_THAT([&] { set->get_batch(std::vector<int64_t>{0}); },
              refuses("a.tar at byte 512", "neither JPEG nor PNG"));
}

TEST_F(TarShardsTest, IsIndexedOnceAndAgainAfterAShardChanges) {
  const auto index_files = [&] {
    std::vector<detail::FileStamp> stamps;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache")) {
      if (entry.path().extension() == ".index") stamps.push_back(detail::stamp_of(entry.path()));
    }
    return stamps;
  };
  const std::string first = member("1.jpg", image_) + member("1.cls", "1");
  const auto before = load_bytes(first + kEnd);
  const auto files = index_files();
  EXPECT_EQ(load("a.tar")->fingerprint(), before->fingerprint());
  EXPECT_EQ(index_files(), files);
  EXPECT_EQ(files.size(), 1U);
  const auto after = load_bytes(first + member("2.jpg", image_) + member("2.cls", "2") + kEnd);
  EXPECT_THAT(after->labels(), ElementsAre(1, 2));
  EXPECT_NE(after->fingerprint(), before->fingerprint());
  // The same members at the same positions with another label.
  EXPECT_THAT(load_bytes(member("1.jpg", image_) + member("1.cls", "3") + kEnd)->labels(),
              ElementsAre(3));
  std::filesystem::remove(folder_ / "a.tar");
  EXPECT_THAT([&] { load("a.tar"); }, refuses("a.tar", "No such file"));
}

/// Limits the number of files that the process can open.
class FewerFiles {
 public:
  explicit FewerFiles(rlim_t max) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit fewer{max, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &fewer);
  }
  ~FewerFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewerFiles(const FewerFiles&) = delete;
  FewerFiles& operator=(const FewerFiles&) = delete;

 private:
  rlimit before_{};
};

TEST_F(TarShardsTest, ReadsMoreShardsThanAProcessMayOpen) {
  constexpr int kShards = 400;
  for (int shard = 0; shard < kShards; ++shard) {
    folder_.write(fmt::format("{:03}.tar", shard),
                  member("1.jpg", image_) + member("1.cls", fmt::format("{}", shard % 10)) + kEnd);
  }
  const FewerFiles few(200);
  const auto set = load(fmt::format("{{000..{}}}.tar", kShards - 1));
  for (const int workers : {0, 4}) {
    auto sampler =
        std::make_shared<ShardSampler>(set->shard_ends(), ShardSamplerOptions{.streams = kShards});
    Loader loader(set, sampler, {.batch_size = 32, .num_workers = workers});
    for (const int64_t epoch : {0, 1}) {
      loader.start_epoch(epoch);
      int64_t samples = 0;
      while (const auto batch = loader.next()) samples += batch->size();
      EXPECT_EQ(samples, kShards);
    }
  }
}

TEST_F(TarShardsTest, NamesAShardThatWasReplacedDuringTheRun) {
  const std::string sample = member("1.jpg", image_) + member("1.cls", "1");
  const auto set = load_bytes(sample + kEnd);
  folder_.write("a.tar", sample + sample + kEnd);
  auto sampler = std::make_shared<ShardSampler>(set->shard_ends(), ShardSamplerOptions{});
  Loader loader(set, sampler, {});
  loader.start_epoch(0);
  EXPECT_THAT([&] { loader.next(); }, refuses("sample 0", "a.tar: it was written to or replaced"));
}

/// The bytes of a rank's remaining batches in the epoch.
std::vector<std::string> rest_of_epoch(Loader& loader) {
  std::vector<std::string> all;
  while (const auto batch = loader.next()) {
    all.emplace_back(static_cast<const char*>(batch->data.const_data_ptr()), batch->data.nbytes());
    for (int64_t i = 0; i < batch->size(); ++i) {
      all.back() += fmt::format(" {}", batch->target[i].item<int64_t>());
    }
  }
  return all;
}

class StreamedShardsTest : public TarShardsTest {
 protected:
  StreamedShardsTest() {
    const std::string other = base::read_file(test::kImages / "jpeg_444.jpg");
    for (int shard = 0; shard < 6; ++shard) {
      std::string bytes;
      for (int i = 0; i < 8 + shard % 3; ++i) {
        bytes += member(fmt::format("{}.jpg", i), i % 2 == 0 ? image_ : other) +
                 member(fmt::format("{}.cls", i), fmt::format("{}", (shard + i) % 10));
      }
      folder_.write(fmt::format("s-{}.tar", shard), bytes + kEnd);
    }
    set_ = load("s-{0..5}.tar");
  }
  Loader loader(LoaderOptions options, int num_replicas = 1, int rank = 0) const {
    return {set_,
            std::make_shared<ShardSampler>(set_->shard_ends(),
                                           ShardSamplerOptions{.num_replicas = num_replicas,
                                                               .rank = rank,
                                                               .seed = 5,
                                                               .buffer_size = 12,
                                                               .streams = 4}),
            options};
  }

  std::shared_ptr<const Dataset> set_;
};

TEST_F(StreamedShardsTest, KnowsWhereItsShardsEnd) {
  EXPECT_THAT(set_->shard_ends(), ElementsAre(8, 17, 27, 35, 44, 54));
}

TEST_F(StreamedShardsTest, BatchesHaveTheSameBytesForAnyNumberOfWorkers) {
  std::vector<std::string> expected;
  for (const int workers : {0, 1, 4, 13}) {
    Loader streaming = loader({.batch_size = 5, .num_workers = workers});
    streaming.start_epoch(2);
    const auto bytes = rest_of_epoch(streaming);
    EXPECT_EQ(bytes.size(), 11U);
    if (expected.empty()) expected = bytes;
    EXPECT_EQ(bytes, expected) << workers << " workers";
    streaming.start_epoch(3);
    EXPECT_NE(rest_of_epoch(streaming), expected);
  }
}

TEST_F(StreamedShardsTest, ResumesAnEpochOnAnotherNumberOfRanks) {
  // Three steps on two ranks, then the rest on one rank with the same global batch size.
  Loader first = loader({.batch_size = 3}, 2, 0);
  Loader second = loader({.batch_size = 3}, 2, 1);
  Loader alone = loader({.batch_size = 6});
  for (Loader* each : {&first, &second, &alone}) {
    each->start_epoch(1);
    for (int step = 0; step < 3; ++step) each->next();
  }
  Loader resumed = loader({.batch_size = 6, .num_workers = 2});
  resumed.resume(first.state());
  EXPECT_EQ(second.state().consumed, first.state().consumed);
  EXPECT_EQ(rest_of_epoch(resumed), rest_of_epoch(alone));
}

TEST(ShardNamesTest, ExpandBraces) {
  using detail::expand_braces;
  EXPECT_THAT(expand_braces("a.tar"), ElementsAre("a.tar"));
  EXPECT_THAT(expand_braces("a-{08..10}.tar"), ElementsAre("a-08.tar", "a-09.tar", "a-10.tar"));
  EXPECT_THAT(expand_braces("{a,b}-{0..1}"), ElementsAre("a-0", "a-1", "b-0", "b-1"));
  EXPECT_THAT(expand_braces("a{,b}{c}"), ElementsAre("ac", "abc"));
  EXPECT_THAT(expand_braces("a{}"), ElementsAre("a"));
  EXPECT_THAT([] { expand_braces("a-{0..1"); }, refuses("a-{0..1", "not closed"));
  for (const char* wrong : {"{3..1}", "{a..b}", "{0..99999999}"}) {
    EXPECT_THAT([&] { expand_braces(wrong); }, refuses(wrong, "not a range"));
  }
}

}  // namespace
}  // namespace syncbn::data
