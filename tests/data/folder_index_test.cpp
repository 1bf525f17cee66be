#include "sets/folder_index.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include "data/spoiled_index.h"
#include "index/index_file.h"
#include "support/temp_folder.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

class FolderIndexTest : public ::testing::Test {
 protected:
  FolderIndexTest() {
    add("data/cat/1.jpg");
    add("data/cat/more/2.jpg");
    add("data/dog/3.jpg");
  }
  void add(const std::string& file) const {
    fs::create_directories((folder_ / file).parent_path());
    folder_.write(file, "");
  }
  IndexCacheOptions cache() const { return {.folder = folder_ / "cache"}; }
  FolderIndex index() const { return index_class_folders(folder_ / "data", cache()); }
  std::vector<std::string> files() const { return files_of(index()); }

  static std::vector<std::string> files_of(const FolderIndex& index) {
    std::vector<std::string> names;
    for (int64_t i = 0; i < index.size(); ++i) names.push_back(index.file(i));
    return names;
  }
  /// The stamp of the index file, which changes with each build.
  FileStamp index_file() const {
    for (const auto& entry : fs::directory_iterator(folder_ / "cache")) {
      if (entry.path().extension() == ".index") return stamp_of(entry.path());
    }
    return {};
  }

  const test::TempFolder folder_;
};

TEST_F(FolderIndexTest, ListsFilesClassesAndLabels) {
  const FolderIndex made = index();
  EXPECT_THAT(files_of(made), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg"));
  EXPECT_THAT(made.labels(), ElementsAre(0, 0, 1));
  EXPECT_THAT(made.classes(), ElementsAre("cat", "dog"));
}

TEST_F(FolderIndexTest, ReportsSystemErrorsAsUnavailable) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_THAT([&] { class_names(folder_ / "data"); },
              ThrowsMessage<base::UnavailableError>(HasSubstr("Too many open files")));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT([&] { class_names(folder_ / "none"); },
              ThrowsMessage<base::UserError>(HasSubstr("cannot read the image folder")));
  fs::create_directory_symlink("nowhere", folder_ / "link");
  EXPECT_THAT([&] { index_class_folders(folder_ / "link", cache()); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("/link': it is a link to 'nowhere', which does not exist")));
}

TEST_F(FolderIndexTest, StampsAFolderOnceItsTimesHaveSettled) {
  // The pauses are shorter than the 20 ms after which a folder's times have settled.
  std::jthread writer([&] {
    for (int i = 0; i < 3; ++i) {
      add(fmt::format("data/cat/new{}.jpg", i));
      std::this_thread::sleep_for(std::chrono::milliseconds(15));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // so that the writer has begun
  const FileStamp stamp = settled_stamp_of(folder_ / "data/cat");
  const auto now = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch());
  EXPECT_GE(now - std::chrono::nanoseconds(stamp.changed_ns), std::chrono::milliseconds(20));
}

TEST_F(FolderIndexTest, IsReusedUntilAFolderChanges) {
  const uint64_t fingerprint = index().fingerprint();
  const FileStamp before = index_file();
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg"));
  // The index depends on the names only, and the fingerprint was stored when it was built.
  folder_.write("data/cat/1.jpg", "other bytes");
  EXPECT_EQ(index().fingerprint(), fingerprint);
  EXPECT_EQ(index_file(), before);
}

TEST_F(FolderIndexTest, IsMadeAnewIfItsArraysDoNotFitEachOther) {
  constexpr size_t kSections = 9;
  files();
  int spoiled = 0;
  for (size_t section = 2; section <= kSections; ++section) {  // after the files' names
    for (size_t word = 0; test::spoil_index(folder_ / "cache", section, word); ++word) {
      const FolderIndex again = index();
      EXPECT_THAT(files_of(again), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg"))
          << "word " << word << " of section " << section;
      EXPECT_THAT(again.labels(), ElementsAre(0, 0, 1));
      EXPECT_THAT(again.classes(), ElementsAre("cat", "dog"));
      ++spoiled;
    }
  }
  EXPECT_GT(spoiled, 30);
}

TEST_F(FolderIndexTest, DetectsFilesAddedRemovedOrRenamedAnywhere) {
  files();
  add("data/dog/2.png");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/2.png", "dog/3.jpg"));
  fs::remove(folder_ / "data/cat/more/2.jpg");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "dog/2.png", "dog/3.jpg"));
  fs::rename(folder_ / "data/dog/2.png", folder_ / "data/dog/4.png");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "dog/3.jpg", "dog/4.png"));
  add("data/cat/more/new/5.jpg");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/more/new/5.jpg", "dog/3.jpg", "dog/4.png"));
  add("data/ant/6.jpg");
  EXPECT_THAT(index().classes(), ElementsAre("ant", "cat", "dog"));
  fs::remove_all(folder_ / "data/cat");
  EXPECT_THAT(files(), ElementsAre("ant/6.jpg", "dog/3.jpg", "dog/4.png"));
}

TEST_F(FolderIndexTest, DetectsThatALinkLeadsToAFolderLater) {
  // As if a disk were mounted: the folders with the links do not change.
  fs::create_directory_symlink(folder_ / "disk/bird", folder_ / "data/bird");
  fs::create_directory_symlink(folder_ / "disk/far", folder_ / "data/cat/far");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg"));
  const FileStamp before = index_file();
  EXPECT_THAT(index().classes(), ElementsAre("cat", "dog"));
  EXPECT_EQ(index().left_out(),
            fmt::format("2 files (1 link to '{0}/bird', 1 link to '{0}/far'), such as 'bird'",
                        (folder_ / "disk").string()));
  EXPECT_EQ(index_file(), before);
  add("disk/far/4.jpg");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/far/4.jpg", "cat/more/2.jpg", "dog/3.jpg"));
  add("disk/bird/5.jpg");
  EXPECT_THAT(index().classes(), ElementsAre("bird", "cat", "dog"));
  EXPECT_EQ(index().left_out(), "");
  EXPECT_THAT(files(), ElementsAre("bird/5.jpg", "cat/1.jpg", "cat/far/4.jpg", "cat/more/2.jpg",
                                   "dog/3.jpg"));
  fs::remove_all(folder_ / "disk");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg"));
}

TEST_F(FolderIndexTest, NamesLinksInPlaceOfAllClasses) {
  fs::create_directory(folder_ / "links");
  for (int i = 10; i < 40; ++i) {
    fs::create_symlink(fmt::format("nowhere{}", i), folder_ / fmt::format("links/{}", i));
  }
  EXPECT_THAT([&] { index_class_folders(folder_ / "links", cache()); },
              ThrowsMessage<base::UserError>(AllOf(
                  HasSubstr("/links': it has no folders; "),
                  HasSubstr("left out: 30 files (1 link to 'nowhere10', 1 link to 'nowhere11', "),
                  HasSubstr("and 10 more), such as '10'"))));
}

TEST_F(FolderIndexTest, DetectsAChangeAfterWhichTheTimeWasSetBack) {
  const auto time = fs::last_write_time(folder_ / "data/cat");
  files();
  add("data/cat/2.jpg");
  fs::last_write_time(folder_ / "data/cat", time);
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/2.jpg", "cat/more/2.jpg", "dog/3.jpg"));
}

TEST_F(FolderIndexTest, FingerprintDependsOnNamesAndTheFirstFileNotOnLocation) {
  base::Fnv1a hash;
  for (const char* name : {"cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg"}) {
    hash.add_bytes(name);
    hash.add_byte(0);
  }
  hash.add_bytes(base::read_file(folder_ / "data/cat/1.jpg"));
  EXPECT_EQ(index().fingerprint(), hash.value());
  fs::rename(folder_ / "data", folder_ / "moved");
  EXPECT_EQ(index_class_folders(folder_ / "moved", cache()).fingerprint(), hash.value());
  fs::copy(folder_ / "moved", folder_ / "val", fs::copy_options::recursive);
  folder_.write("val/cat/1.jpg", "another image of this name");
  EXPECT_NE(index_class_folders(folder_ / "val", cache()).fingerprint(), hash.value());
}

TEST_F(FolderIndexTest, NamesFilesOfOtherFormatsAndThoseThatAreStillEmpty) {
  const auto text = [this]() -> std::string {
    const FolderIndex made = index();
    const std::vector<Remark> remarks =
        remarks_on(made, "", [&](int64_t i) { return folder_ / "data" / made.file(i); });
    if (remarks.empty()) return "";
    EXPECT_TRUE(remarks.at(0).is_fault);
    return remarks.at(0).text.substr(0, remarks.at(0).text.find(':'));
  };
  const std::string root = folder_ / "data";
  EXPECT_EQ(text(), fmt::format("3 files (empty), such as '{}/cat/1.jpg' cannot be read", root));
  // These files are written in place, so the index is not rebuilt.
  const FileStamp before = index_file();
  for (const char* file : {"cat/1.jpg", "dog/3.jpg"})
    folder_.write(fmt::format("data/{}", file), "x");
  EXPECT_EQ(text(),
            fmt::format("1 file (empty), such as '{}/cat/more/2.jpg' cannot be read", root));
  EXPECT_EQ(index_file(), before);
  folder_.write("data/cat/more/2.jpg", "x");
  EXPECT_EQ(text(), "");
  folder_.write("data/cat/4.webp", "RIFF");
  EXPECT_EQ(text(), fmt::format("1 file (.webp), such as '{}/cat/4.webp' cannot be read", root));
  // Only files that were empty are looked at again.
  folder_.write("data/cat/4.webp", "\xff\xd8\xff\xe0 and so on");
  EXPECT_EQ(text(), fmt::format("1 file (.webp), such as '{}/cat/4.webp' cannot be read", root));
  folder_.write("data/cat/4.webp", "RIFF");
  fs::create_symlink("nowhere", folder_ / "data/dog/4.jpg");
  for (int i = 5; i <= 9; ++i) add(fmt::format("data/dog/{}.png", i));
  EXPECT_EQ(
      text(),
      fmt::format("7 files (1 .webp, 5 empty, 1 missing), such as '{}/cat/4.webp' cannot be read",
                  root));
  fs::create_symlink("nowhere", folder_ / "data/cat/0.jpg");
  EXPECT_EQ(text(), fmt::format("8 files (1 .webp, 5 empty, 2 missing), such as '{}/cat/0.jpg' "
                                "cannot be read (it is a link to 'nowhere', which does not exist)",
                                root));
  const FolderIndex made = index();
  const auto remarks =
      remarks_on(made, "", [&](int64_t i) { return folder_ / "data" / made.file(i); });
  EXPECT_THAT(remarks.at(0).unreadable,
              AllOf(SizeIs(8), IsSupersetOf({Pair(root + "/cat/0.jpg", kMissingFile),
                                             Pair(root + "/cat/4.webp", kOtherContent),
                                             Pair(root + "/dog/9.png", kEmptyFile)})));
}

TEST_F(FolderIndexTest, SaysWhatToDoAboutFilesThatCannotBeRead) {
  const auto text = [this] {
    const FolderIndex made = index();
    return remarks_on(made, "", [&](int64_t i) { return folder_ / "data" / made.file(i); })
        .at(0)
        .text;
  };
  fs::create_symlink("nowhere", folder_ / "data/dog/4.jpg");
  EXPECT_THAT(text(), AllOf(HasSubstr("cannot be read: copy them again, or remove them (`train"),
                            Not(HasSubstr("convert"))));
  folder_.write("data/cat/4.webp", "RIFF");
  EXPECT_THAT(text(), HasSubstr("cannot be read: convert them to JPEG or PNG (ImageMagick: "
                                "mogrify -format png FILE), mend or remove them (`train"));
}

TEST_F(FolderIndexTest, TakesImagesByTheirContentWhateverTheirNames) {
  const std::string jpeg = "\xff\xd8\xff\xe0 and so on";
  const std::string png = "\x89PNG\r\n\x1a\n and so on";
  folder_.write("data/cat/a.jfif", jpeg);
  folder_.write("data/cat/b", png);
  folder_.write("data/cat/c.webp", jpeg);
  folder_.write("data/cat/d.JPG_large", jpeg);
  folder_.write("data/cat/e.txt", "text");
  folder_.write("data/dog/f.gif", "GIF89a and so on");
  folder_.write("data/dog/g.HEIC", "....ftypheic");
  folder_.write("data/dog/h.gif", "\xff");
  const FolderIndex made = index();
  EXPECT_THAT(files_of(made), ElementsAre("cat/1.jpg", "cat/a.jfif", "cat/b", "cat/c.webp",
                                          "cat/d.JPG_large", "cat/more/2.jpg", "dog/3.jpg"));
  EXPECT_EQ(made.left_out(), "3 files (1 .HEIC, 2 .gif), such as 'dog/f.gif'");
  EXPECT_THAT(made.unreadable(), ElementsAre(0, 5, 6)) << "the empty ones";
}

TEST_F(FolderIndexTest, ASplitMayLackClassesOfTraining) {
  fs::create_directory(folder_ / "data/eel");
  EXPECT_THAT([&] { index(); },
              ThrowsMessage<base::UserError>(HasSubstr("there are no images in eel")));
  folder_.write("data/eel/1.gif", "GIF89a");
  EXPECT_THAT([&] { index(); }, ThrowsMessage<base::UserError>(HasSubstr(
                                    "neither JPEG nor PNG: 1 file (.gif), such as 'eel/1.gif'")));
  fs::remove(folder_ / "data/eel/1.gif");
  const std::vector<std::string> trained = {"ant", "cat", "dog", "eel"};
  const FolderIndex some = index_class_folders(folder_ / "data", cache(), trained);
  EXPECT_EQ(some.classes(), trained);
  EXPECT_THAT(some.labels(), ElementsAre(1, 1, 2));
  // Other classes are another index.
  fs::remove(folder_ / "data/eel");
  EXPECT_THAT(index().labels(), ElementsAre(0, 0, 1));
  EXPECT_THAT(index_class_folders(folder_ / "data", cache(), {"cat", "dog"}).labels(),
              ElementsAre(0, 0, 1));
  fs::create_directories(folder_ / "none/cat");
  EXPECT_THAT([&] { index_class_folders(folder_ / "none", cache(), trained); },
              ThrowsMessage<base::UserError>(HasSubstr("there are no images in cat")));
}

TEST_F(FolderIndexTest, RefusesALinkToAFolderThatContainsIt) {
  const auto refuses = [&](const std::string& link) {
    EXPECT_THAT([&] { index(); },
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr((folder_ / link).string()), HasSubstr("remove the link"))));
    fs::remove(folder_ / link);
  };
  fs::create_directory_symlink("..", folder_ / "data/cat/more/up");
  refuses("data/cat/more/up");
  fs::create_directory_symlink(".", folder_ / "data/dog/here");
  refuses("data/dog/here");
  fs::create_directory_symlink("../../data", folder_ / "data/dog/root");
  refuses("data/dog/root");
  // A folder may be in several places that are not within each other.
  fs::create_directory_symlink("../cat/more", folder_ / "data/dog/copy");
  fs::create_directory_symlink("../cat/more", folder_ / "data/dog/other");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg", "dog/copy/2.jpg",
                                   "dog/other/2.jpg"));
}

TEST_F(FolderIndexTest, RefusesALinkThatCannotBeFollowed) {
  // Leaving out a class would give the ones after it other labels. Root may read every folder, so
  // the link's name is too long instead.
  const fs::path bird = folder_ / "data/bird";
  const std::string unreadable(300, 'x');
  fs::create_symlink(unreadable, bird);
  EXPECT_THAT([&] { index(); },
              ThrowsMessage<base::UserError>(AllOf(HasSubstr("cannot read '" + bird.string() + "'"),
                                                   HasSubstr("File name too long"))));
  fs::remove(bird);
  // A link that leads nowhere is no class, and an image is reported when it is read.
  fs::create_symlink("nowhere", bird);
  fs::create_symlink(unreadable, folder_ / "data/cat/2.jpg");
  EXPECT_THAT(files(), ElementsAre("cat/1.jpg", "cat/2.jpg", "cat/more/2.jpg", "dog/3.jpg"));
}

TEST_F(FolderIndexTest, FindsEmptyMasks) {
  add("images/b.jpg");
  folder_.write("images/b.jpg", "x");
  add("masks/b.png");
  const FolderIndex pairs = index_pairs(folder_ / "images", folder_ / "masks", cache());
  EXPECT_THAT(pairs.unreadable(), ElementsAre(1));
}

TEST_F(FolderIndexTest, PairsImagesWithMasks) {
  add("images/b.jpg");
  add("images/a.b.png");
  add("masks/b.png");
  add("masks/a.b.png");
  add("masks/c.png");
  const FolderIndex pairs = index_pairs(folder_ / "images", folder_ / "masks", cache());
  EXPECT_THAT(files_of(pairs), ElementsAre("a.b.png", "b.jpg", "a.b.png", "b.png"));
  EXPECT_THAT(pairs.labels(), IsEmpty());
  add("images/c.jpg");
  EXPECT_EQ(index_pairs(folder_ / "images", folder_ / "masks", cache()).size(), 6);
  add("images/d.jpg");
  add("masks/d.gif");
  const auto refuses = [&](const std::string& names) {
    const std::string where = folder_.path().string();
    EXPECT_THAT([&] { index_pairs(folder_ / "images", folder_ / "masks", cache()); },
                ThrowsMessage<base::UserError>(HasSubstr(fmt::format(
                    "no mask in '{0}/masks', a PNG of the same name, for {1}; add the masks, or",
                    where, fmt::format(fmt::runtime(names), where)))));
  };
  refuses("1 of 4 images in '{}/images': d.jpg");
  for (int i = 1; i <= 6; ++i) add(fmt::format("images/e{}.jpg", i));
  refuses("7 of 10 images in '{}/images': d.jpg, e1.jpg, e2.jpg, e3.jpg, e4.jpg, and 2 more");
}

TEST_F(FolderIndexTest, FindsEveryFileInFoldersOfAllSizes) {
  std::vector<std::string> expected;
  for (int folder = 0; folder < 20; ++folder) {
    // Some of the folders are empty.
    for (int file = 0; file < folder * folder % 7; ++file) {
      expected.push_back(fmt::format("x/{:02}/{}.png", folder, file));
      add("sizes/" + expected.back());
    }
    fs::create_directories(folder_ / fmt::format("sizes/x/{:02}", folder));
  }
  EXPECT_EQ(files_of(index_class_folders(folder_ / "sizes", cache())), expected);
}

}  // namespace
}  // namespace syncbn::data::detail
