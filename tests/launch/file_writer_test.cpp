#include "output/file_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/clock.h"
#include "support/temp_folder.h"

namespace syncbn::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// A FIFO stands for a file on a server that does not answer until the reader reads.
class FileWriterTest : public ::testing::Test {
 protected:
  FileWriterTest() {
    EXPECT_EQ(::mkfifo(path_.c_str(), 0600), 0);
    EXPECT_THROW(open_to_append(path_, "a FIFO that nobody reads"), base::Error);
    reader_.reset(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    slow_ = {path_, "the log"};
  }

  FileWriter::OnError note() {
    return [this](const std::string& what) { errors_.push_back(what); };
  }
  void append(const std::string& text) { writer_.append(slow_, text, note()); }
  bool has_room(milliseconds patience) const {
    return base::poll_until(writer_.fd(), POLLIN, Clock::now() + patience);
  }
  std::string read(size_t size) const {
    std::string text(size, '\0');
    for (size_t got = 0; got < size;) {
      EXPECT_TRUE(base::poll_until(reader_.get(), POLLIN, Clock::now() + seconds(60)));
      got += static_cast<size_t>(::read(reader_.get(), text.data() + got, size - got));
    }
    return text;
  }

  const test::TempFolder temp_;
  const std::string path_ = temp_ / "fifo";
  base::UniqueFd reader_;
  OpenFile slow_;
  FileWriter writer_;
  std::vector<std::string> errors_;
};

TEST_F(FileWriterTest, AFileThatIsNotWrittenHoldsUpNobodyAndLosesNothing) {
  EXPECT_FALSE(writer_.is_full());
  std::string all;
  for (char letter = 'a'; !writer_.is_full(); ++letter) {
    const std::string text(FileWriter::kMaxPending / 4, letter);
    append(text);
    all += text;
  }
  EXPECT_FALSE(has_room({}));
  const std::string other = temp_ / "other";
  writer_.add(
      other, [other] { base::write_file_atomically(other, "x"); }, note());
  EXPECT_FALSE(base::exists(other)) << "files are written in order";
  EXPECT_EQ(read(all.size()), all);
  EXPECT_TRUE(has_room(seconds(60)));
  writer_.finish(seconds(60));
  EXPECT_FALSE(writer_.is_full());
  EXPECT_EQ(base::read_file(other), "x");
  EXPECT_THAT(errors_, IsEmpty());
}

TEST_F(FileWriterTest, TheFileThatDoesNotAnswerIsNamed) {
  const std::string text(size_t{1} << 20, 'x');
  append(text);
  append(text);
  writer_.add(
      "other", [] {}, note());
  writer_.finish(milliseconds(50));
  const std::string slow = "the log " + path_;
  EXPECT_THAT(errors_, ElementsAre("cannot write " + slow + ": no answer within 50 ms",
                                   "cannot write " + slow + ": no answer within 50 ms",
                                   "cannot write other: no answer for " + slow + " within 50 ms"));
  // Another thread writes what comes next.
  const std::string report = temp_ / "report";
  writer_.add(
      report, [report] { base::write_file_atomically(report, "y"); }, note());
  writer_.finish(seconds(60));
  EXPECT_EQ(base::read_file(report), "y");
  EXPECT_EQ(errors_.size(), 3);
}

TEST_F(FileWriterTest, AFailureIsReportedInTheCallersThread) {
  writer_.append({"/dev/full", "the log"}, "x", note());
  writer_.add(
      "f", [] { throw std::runtime_error("cannot write f"); }, note());
  while (errors_.size() < 2) writer_.handle();
  EXPECT_THAT(errors_, ElementsAre("cannot write the log /dev/full: No space left on device",
                                   "cannot write f"));
  writer_.finish(seconds(60));
  EXPECT_EQ(errors_.size(), 2);
}

}  // namespace
}  // namespace syncbn::launch
