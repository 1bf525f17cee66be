#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/held_port.h>
#include <syncbn/base/log.h>
#include <syncbn/base/machine_id.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/private_folder.h>
#include <syncbn/base/random.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

/// The errno with which fsync() of a folder fails; 0: fsync() works.
static int folder_sync_error = 0;

/// Replaces libc's fsync().
extern "C" int fsync(int fd) {
  struct stat status {};
  if (folder_sync_error == 0 || ::fstat(fd, &status) != 0 || !S_ISDIR(status.st_mode)) {
    return static_cast<int>(::syscall(SYS_fsync, fd));
  }
  errno = folder_sync_error;
  return -1;
}

namespace {

namespace fs = std::filesystem;
using namespace syncbn::base;  // NOLINT: the module under test
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(PrivateFolderTest, ANewOneIsForItsOwnerAndAnOldOneStaysAsItIs) {
  ::umask(022);
  const syncbn::test::TempFolder temp;
  const auto mode = [](const fs::path& path) {
    return static_cast<int>(fs::status(path).permissions());
  };
  EXPECT_EQ(make_private_folder(temp / "parent" / "run/"), 0);
  EXPECT_EQ(mode(temp / "parent/run"), 0700);
  EXPECT_EQ(mode(temp / "parent"), 0755);
  EXPECT_EQ(make_private_folder(temp / "parent"), 0);
  EXPECT_EQ(mode(temp / "parent"), 0755);
  write_file_atomically(temp / "file", "");
  EXPECT_EQ(make_private_folder(temp / "file"), ENOTDIR);
  EXPECT_EQ(make_private_folder(temp / "file/run"), ENOTDIR);
  fs::create_symlink("loop", temp / "loop");
  EXPECT_EQ(make_private_folder(temp / "loop"), ELOOP);
}

class AtomicFileTest : public ::testing::Test {
 protected:
  size_t entries() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  const syncbn::test::TempFolder temp_;
  const fs::path folder_ = temp_.path();
};

TEST_F(AtomicFileTest, ReplacesTheWholeFileAndLeavesNothingElse) {
  write_file_atomically(folder_ / "a" / "file", "old and long");
  write_file_atomically(folder_ / "a" / "file", std::string_view("n\0w", 3));
  EXPECT_EQ(read_file(folder_ / "a" / "file"), std::string("n\0w", 3));
  EXPECT_EQ(entries(), 1u);
}

TEST_F(AtomicFileTest, KeepsTheOldFilesPermissions) {
  write_file_atomically(folder_ / "file", "old");
  for (const fs::perms mode : {fs::perms{0600}, fs::perms{0444}, fs::perms{0666}}) {
    fs::permissions(folder_ / "file", mode);
    write_file_atomically(folder_ / "file", "new");
    EXPECT_EQ(fs::status(folder_ / "file").permissions(), mode);
  }
}

TEST_F(AtomicFileTest, KeepsTheOldFileWhenWritingFails) {
  write_file_atomically(folder_ / "file", "old");
  EXPECT_THROW(write_file_atomically(folder_ / "file",
                                     [](const fs::path& temporary) {
                                       write_file_atomically(temporary, "half");
                                       throw UnavailableError("disk full");
                                     }),
               UnavailableError);
  EXPECT_EQ(read_file(folder_ / "file"), "old");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(AtomicFileTest, ReplacesFilesInFoldersThatCannotBeSynced) {
  for (const int error : {EINVAL, EBADF}) {
    folder_sync_error = error;
    EXPECT_NO_THROW(write_file_atomically(folder_ / "file", std::to_string(error)));
    EXPECT_EQ(read_file(folder_ / "file"), std::to_string(error));
  }
  folder_sync_error = EIO;
  EXPECT_THROW(write_file_atomically(folder_ / "file", "new"), UnavailableError);
  folder_sync_error = 0;
}

TEST_F(AtomicFileTest, WritesTheFileBehindALink) {
  write_file_atomically(folder_ / "file", "old");
  fs::create_symlink("file", folder_ / "link");
  fs::create_symlink("new", folder_ / "dangling");
  write_file_atomically(folder_ / "link", "one");
  write_file_atomically(folder_ / "dangling", "two");
  EXPECT_EQ(read_file(folder_ / "file"), "one");
  EXPECT_EQ(read_file(folder_ / "new"), "two");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_TRUE(fs::is_symlink(folder_ / "dangling"));
}

TEST_F(AtomicFileTest, LeavesWhatIsNoRegularFileInItsPlace) {
  const fs::path fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THROW(write_file_atomically(fifo, "nobody reads"), Error);
  EXPECT_THROW(check_can_write(fifo), Error);
  const UniqueFd reader(::open(fifo.c_str(), O_RDONLY | O_NONBLOCK));
  check_can_write(fifo);
  write_file_atomically(fifo, "bytes");
  std::array<char, 16> buffer{};
  EXPECT_EQ(::read(reader.get(), buffer.data(), buffer.size()), 5);
  // A writer that gets a path needs a regular file.
  EXPECT_THAT(
      [&] { write_file_atomically(fifo, [](const fs::path&) {}); },
      ThrowsMessage<UserError>(HasSubstr("fifo: it is not a regular file; choose another")));
  EXPECT_TRUE(fs::is_fifo(fifo));

  // An open file, under a name like the one that /dev/stdout leads to.
  const UniqueFd open(::open((folder_ / "open").c_str(), O_WRONLY | O_CREAT, 0600));
  ASSERT_EQ(::write(open.get(), "before ", 7), 7);
  write_file_atomically(fmt::format("/proc/self/fd/{}", open.get()), "after");
  EXPECT_EQ(read_file(folder_ / "open"), "before after");
}

TEST_F(AtomicFileTest, ReplacesFilesInSharedMemory) {
  const fs::path file = fmt::format("/dev/shm/syncbn-test-{}", ::getpid());
  write_file_atomically(file, "longer");
  write_file_atomically(file, "new");
  EXPECT_EQ(read_file(file), "new");
  fs::remove(file);
}

// Two containers with the same folder, whose processes have the same id.
TEST_F(AtomicFileTest, TwoWritersOfAFileDoNotDisturbEachOther) {
  const fs::path file = folder_ / "file";
  write_file_atomically(file, [&](const fs::path& temporary) {
    std::ofstream(temporary) << "ours";
    check_can_write(file);
    write_file_atomically(file, "theirs");
    EXPECT_EQ(read_file(file), "theirs");
  });
  EXPECT_EQ(read_file(file), "ours");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(AtomicFileTest, SaysBeforehandWhatCannotBeWritten) {
  check_can_write(folder_ / "a" / "file");
  EXPECT_FALSE(fs::exists(folder_ / "a" / "file"));
  EXPECT_TRUE(fs::is_empty(folder_ / "a"));
  write_file_atomically(folder_ / "kept", "old");
  check_can_write(folder_ / "kept");
  EXPECT_EQ(read_file(folder_ / "kept"), "old");
  EXPECT_THROW(check_can_write(folder_), UserError);
  EXPECT_THROW(check_can_write("/proc/nowhere"), UserError);
}

TEST_F(AtomicFileTest, TakesNamesAsLongAsTheyMayBe) {
  const std::string name(255, 'x');
  write_file_atomically(folder_ / name, "bytes");
  EXPECT_EQ(read_file(folder_ / name), "bytes");
}

TEST_F(AtomicFileTest, APathThatCannotBeIsTheUsersToMend) {
  write_file_atomically(folder_ / "file", "");
  fs::create_directory(folder_ / "folder");
  fs::create_symlink("loop", folder_ / "loop");
  const std::string long_name(300, 'x');
  for (const fs::path& path :
       {folder_ / "file/a/b", folder_ / "folder", folder_ / "loop/a", folder_ / long_name / "a",
        folder_ / long_name, fs::path("/proc/nowhere/a")}) {
    EXPECT_THAT(syncbn::test::message_of<UserError>([&] { write_file_atomically(path, "bytes"); }),
                HasSubstr(path.parent_path().string()));
  }
}

TEST_F(AtomicFileTest, AFailingDiskIsNotTheUsersToMend) {
  for (const int error : {ENOSPC, EIO, EDQUOT}) {
    EXPECT_THROW(throw_file_error("cannot write x", error), UnavailableError);
  }
}

TEST_F(AtomicFileTest, ReadingWhatIsNotThereNamesTheFile) {
  for (const fs::path& path : {folder_ / "missing", folder_}) {
    EXPECT_THAT(syncbn::test::message_of<UserError>([&] { read_file(path); }),
                HasSubstr(path.string()));
  }
}

TEST_F(AtomicFileTest, AFileThatCannotBeOpenedNowIsNotTheUsersMistake) {
  write_file_atomically(folder_ / "file", "bytes");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_THAT([&] { read_file(folder_ / "file"); },
              ThrowsMessage<UnavailableError>(HasSubstr("file: Too many open files")));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(read_file(folder_ / "file"), "bytes");
}

TEST_F(AtomicFileTest, ReadingWaitsForNobodyAndEnds) {
  const fs::path fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(read_file(fifo), "") << "nobody writes";
  EXPECT_THAT([] { read_file("/dev/zero"); },
              ThrowsMessage<UserError>("/dev/zero is larger than 67.1 MB"));
  // A pipe, as for a shell's <(…).
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  std::thread writer([end = ends[1]] {
    for (const char* part : {"a", "b"}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the reader waits for each part
      ASSERT_EQ(::write(end, part, 1), 1);
    }
    ::close(end);
  });
  EXPECT_EQ(read_file(fmt::format("/dev/fd/{}", ends[0])), "ab");
  writer.join();
  ::close(ends[0]);
}

TEST_F(AtomicFileTest, OpeningToReadWaitsForNobody) {
  const fs::path fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const UniqueFd reader = open_to_read(fifo);
  ASSERT_TRUE(reader);
  EXPECT_EQ(::fcntl(reader.get(), F_GETFL) & O_NONBLOCK, 0) << "reads wait for a writer's bytes";
  fs::create_symlink("loop", folder_ / "loop");
  EXPECT_TRUE(is_missing(folder_ / "missing"));
  EXPECT_FALSE(is_missing(folder_ / "loop")) << "opening it says that it is a loop";
  EXPECT_FALSE(open_to_read(folder_ / "missing"));
  EXPECT_EQ(errno, ENOENT);
  for (const fs::path& path : {fifo, folder_, fs::path("/dev/zero")}) {
    EXPECT_THAT([&] { open_regular_file(path); },
                ThrowsMessage<UserError>(
                    fmt::format("cannot read {}: it is not a regular file", path.string())));
  }
  EXPECT_THAT([&] { open_regular_file(folder_ / "missing"); },
              ThrowsMessage<UserError>(HasSubstr("missing: No such file or directory")));
}

TEST_F(AtomicFileTest, ALinkToNothingIsNamedWithItsTarget) {
  const fs::path link = folder_ / "link";
  fs::create_symlink("nowhere", link);
  const std::string why = "it is a link to 'nowhere', which does not exist";
  EXPECT_EQ(dangling_link(link), why);
  const std::string message = fmt::format("cannot read {}: {}", link.string(), why);
  EXPECT_THAT([&] { open_regular_file(link); }, ThrowsMessage<UserError>(message));
  EXPECT_THAT([&] { read_file(link); }, ThrowsMessage<UserError>(message));
  write_file_atomically(folder_ / "nowhere", "");
  for (const fs::path& other : {link, folder_ / "nowhere", folder_ / "missing"}) {
    EXPECT_EQ(dangling_link(other), "");
  }
}

TEST(IsWithinTest, ANameLeadsNowhereButIntoTheFolder) {
  const std::string here = fs::current_path();
  for (const char* folder : {"photos", "photos/", "./photos", "a/../photos", "/srv/photos"}) {
    const std::string absolute = folder[0] == '/' ? folder : here + "/photos";
    for (const std::string& name :
         {std::string("1.jpg"), std::string("a/b/..1.jpg"), std::string("a/../1.jpg"),
          absolute + "/a/1.jpg", std::string("../photos/1.jpg"), std::string("1..jpg")}) {
      EXPECT_TRUE(is_within(folder, name)) << folder << " " << name;
    }
    for (const std::string& name :
         {std::string(), std::string(".."), std::string("../1.jpg"), std::string("a/../../1.jpg"),
          std::string("/etc/1.jpg"), absolute, absolute + "/..", absolute + "2/1.jpg"}) {
      EXPECT_FALSE(is_within(folder, name)) << folder << " " << name;
    }
  }
  EXPECT_FALSE(is_within("photos", std::string("../../1.jpg\0/../../photos/1.jpg", 31)));
  EXPECT_TRUE(is_within("/", "/srv/1.jpg"));
  EXPECT_TRUE(is_within(".", "a/../1.jpg"));
  EXPECT_FALSE(is_within(".", "a/../../1.jpg"));
}

TEST(EnvTest, AnEmptyVariableIsUnset) {
  ::setenv("SYNCBN_TEST_VARIABLE", "", 1);
  EXPECT_FALSE(env("SYNCBN_TEST_VARIABLE"));
  EXPECT_FALSE(env_int("SYNCBN_TEST_VARIABLE", 0, 9));
}

TEST(MachineIdTest, IsTheHostsNameWhereTheBootIdCannotBeRead) {
  EXPECT_EQ(machine_id("/missing"), hostname());
  EXPECT_NE(machine_id(), hostname());
}

TEST(EnvTest, IntegersAreCheckedWhole) {
  for (const char* value : {"10", "-1", "3x", " 3", "three", "99999999999999999999"}) {
    ::setenv("SYNCBN_TEST_VARIABLE", value, 1);
    EXPECT_THAT(
        syncbn::test::message_of<UserError>([] { env_int("SYNCBN_TEST_VARIABLE", 0, 9); }),
        AllOf(HasSubstr(fmt::format("SYNCBN_TEST_VARIABLE={}", value)), HasSubstr("from 0 to 9")));
  }
  ::setenv("SYNCBN_TEST_VARIABLE", "9", 1);
  EXPECT_EQ(env_int("SYNCBN_TEST_VARIABLE", 0, 9), 9);
}

TEST(ErrorTest, AFailedCallSaysWhatTheSystemSaid) {
  errno = ENOENT;
  EXPECT_EQ(syncbn::test::message_of<UnavailableError>([] { throw_errno("cannot open x"); }),
            "cannot open x: No such file or directory");
}

TEST(ErrorTest, AnUnreachableNetworkNamesALoopbackInterfaceThatIsDown) {
  EXPECT_EQ(describe_errno(ENETUNREACH), "Network is unreachable");
  SYNCBN_SKIP_UNLESS(::unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0, "namespaces");
  EXPECT_EQ(describe_errno(ENETUNREACH),
            "Network is unreachable; the loopback interface, lo, is down: ip link set lo up");
}

TEST(RunMainTest, AnEscapingErrorIsOneMessageAndItsCode) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_main("prog", []() -> int { throw UserError("no file 'x\x1b[2J'"); }), 2);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "prog: error: no file 'x\\x1b[2J'\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_main("prog", []() -> int { throw std::runtime_error("boom"); }), 70);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "prog: uncaught exception: boom\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_main("prog", []() -> int { throw std::bad_alloc(); }), 75);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "prog: error: there is not enough memory\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_main("prog", []() -> int { throw InternalError("n is 3"); }), 70);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "prog: internal error: n is 3\nprog: this is a bug; please report it\n");
  EXPECT_EQ(run_main("prog", [] { return 5; }), 5);
}

TEST(RunMainTest, ACrashLosesNoLineThatWasPrintedToAPipe) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::fflush(stdout);
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    std::setvbuf(stdout, nullptr, _IOFBF, BUFSIZ);  // another test may have called run_main()
    run_main("prog", []() -> int {
      std::fputs("line\n", stdout);
      ::_exit(0);
    });
    ::_exit(1);
  }
  ::close(ends[1]);
  char text[8] = {};
  EXPECT_EQ(::read(ends[0], text, sizeof(text)), 5);
  EXPECT_STREQ(text, "line\n");
  ::close(ends[0]);
  ::waitpid(pid, nullptr, 0);
}

TEST(ErrorTest, EachExceptionHasItsExitCode) {
  EXPECT_EQ(exit_code_of(UserError("")), kExitUsage);
  EXPECT_EQ(exit_code_of(UnavailableError("")), kExitUnavailable);
  EXPECT_EQ(exit_code_of(InternalError("")), kExitInternal);
  EXPECT_EQ(kExitInternal, 70) << "docs/errors.md";
  EXPECT_EQ(exit_code_of(std::system_error(ENOSPC, std::generic_category())), kExitUnavailable);
  EXPECT_EQ(exit_code_of(std::bad_alloc()), kExitUnavailable);
  EXPECT_EQ(exit_code_of(std::runtime_error("")), kExitInternal);
}

TEST(TextTest, NearestFindsTyposAndNothingFarAway) {
  EXPECT_EQ(nearest("optimzer", {"epochs", "optimizer"}), "optimizer");
  EXPECT_EQ(nearest("lr", {"momentum", "nesterov"}), std::nullopt);
  EXPECT_EQ(did_you_mean("epoch", {"epochs"}), "; did you mean 'epochs'?");
  EXPECT_EQ(did_you_mean("zzzzz", {"epochs"}), "");
  EXPECT_EQ(nearest("optim", {"optimizer.type", "optimizer"}), "optimizer");
  EXPECT_EQ(nearest("op", {"optimizer"}), std::nullopt);
  EXPECT_EQ(nearest("nprocs", {"nnodes", "nproc_per_node"}), "nproc_per_node");
  EXPECT_EQ(nearest("optix9", {"optimizer"}), std::nullopt);
}

TEST(TextTest, WhatCannotBeShownIsEscaped) {
  const std::string plain = "a ~ \u00e9 \u20ac \U0001f600 \u00a0 \U0010ffff";
  EXPECT_EQ(printable(plain), plain);
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\x1b[2J\x7f\r\n\t"), "\\x1b[2J\\x7f\\x0d\\x0a\\x09");
  EXPECT_EQ(printable("\x1b\r\n\t", "\n\t"), "\\x1b\\x0d\n\t");
  EXPECT_EQ(printable("\ufeffhost \u009b"), "\\xef\\xbb\\xbfhost \\xc2\\x9b");
  // Not UTF-8: a lone byte, cut off, overlong, a surrogate, too high.
  EXPECT_EQ(printable("\x80 \xff \xe2\x82"), "\\x80 \\xff \\xe2\\x82");
  EXPECT_EQ(printable("\xc0\xaf \xe0\x80\xaf"), "\\xc0\\xaf \\xe0\\x80\\xaf");
  EXPECT_EQ(printable("\xed\xa0\x80 \xf4\x90\x80\x80"), "\\xed\\xa0\\x80 \\xf4\\x90\\x80\\x80");
}

TEST(TextTest, DurationsAndSizesReadWell) {
  EXPECT_EQ(format_seconds(0.00032), "320 us");
  EXPECT_EQ(format_seconds(0.0009996), "1 ms");
  EXPECT_EQ(format_seconds(0.32), "320 ms");
  EXPECT_EQ(format_seconds(0.9997), "1.0 s");
  EXPECT_EQ(format_seconds(1.5), "1.5 s");
  EXPECT_EQ(format_seconds(59.94), "59.9 s");
  EXPECT_EQ(format_seconds(59.97), "1 min 0 s");
  EXPECT_EQ(format_seconds(125), "2 min 5 s");
  EXPECT_EQ(format_seconds(3720), "1 h 2 min");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(57'300), "57.3 kB");
  EXPECT_EQ(format_bytes(999'960), "1.0 MB");
  EXPECT_EQ(format_bytes(1'200'000'000), "1.2 GB");
}

TEST(TextTest, ANumberOfOneTakesTheSingular) {
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(2, "rank"), "2 ranks");
}

TEST(ErrorTest, ALimitThatIsReachedIsNamedWithItsValueAndAdvice) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit before = limit;
  limit.rlim_cur = 123;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(describe_errno(EMFILE),
            "Too many open files; this process may have 123 (ulimit -n): raise the limit");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(describe_errno(ENFILE),
              ::testing::MatchesRegex("Too many open files in system; .* [0-9]+ \\(sysctl "
                                      "fs.file-max\\): raise the limit"));
  EXPECT_THAT(describe_errno(EAGAIN),
              ::testing::MatchesRegex("Resource temporarily unavailable; this user may have "
                                      "([0-9]+|unlimited) processes .*\\(ulimit -u\\).*"));
  EXPECT_THAT(describe_errno(ENOMEM),
              ::testing::MatchesRegex("Cannot allocate memory; this process may have "
                                      "([0-9]+|unlimited) bytes .*\\(ulimit -v\\).*"));
  EXPECT_EQ(describe_errno(EPIPE), "Broken pipe");
}

TEST(RunMainTest, AThreadThatCannotStartNamesTheLimit) {
  ::testing::internal::CaptureStderr();
  const int code =
      run_main("train", []() -> int { throw std::system_error(EAGAIN, std::generic_category()); });
  EXPECT_EQ(code, kExitUnavailable);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("train: error: cannot start a thread: Resource temporarily "
                              "unavailable; this user may have "),
                    HasSubstr("(ulimit -u)")));
}

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) != -1;
}

TEST(TextTest, NumbersAreReadWhole) {
  EXPECT_EQ(parse_number<int>("-12"), -12);
  EXPECT_EQ(parse_number<int64_t>("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_number<double>("1e-1"), 0.1);
  for (const char* text : {"", " 1", "1 ", "+1", "1.0", "0x1", "2147483648", "one"}) {
    EXPECT_FALSE(parse_number<int>(text)) << text;
  }
}

TEST(TextTest, CutsNoCharacterOfUtf8) {
  EXPECT_EQ(utf8_prefix("abc", 3), "abc");
  EXPECT_EQ(utf8_prefix("abc", 2), "ab");
  EXPECT_EQ(utf8_prefix("a\u00e4", 2), "a");
  EXPECT_EQ(utf8_prefix("\u20ac", 2), "");
}

TEST(TextTest, ShortensTextToColumnsAndListsToTheirFirstParts) {
  EXPECT_EQ(shortened("äöü", 3), "äöü");
  EXPECT_EQ(shortened("äöüß", 3), "äö…");
  EXPECT_EQ(join_some({"a", "b"}, ", ", 2), "a, b");
  EXPECT_EQ(join_some({"a", "b", "c", "d"}, ", ", 2), "a, b, and 2 more");
}

TEST(TextTest, TellsWhatLiesInPlaceOfAFile) {
  for (const auto& [begin, what] : std::vector<std::pair<std::string, std::string>>{
           {"version https://git-lfs.github.com/spec/v1\n", "fetch it with `git lfs pull`"},
           {"<!DOCTYPE html>", "it is HTML, SVG or other XML; if a server sent it"},
           {"\xef\xbb\xbf\n <?xml version=\"1.0\"?>", "it is HTML, SVG or other XML"},
           {"\x1f\x8b\x08", "it is a compressed file: unpack it with `gzip -dc FILE > NEW_FILE`"},
           {"PK\x03\x04", "`unzip`"},
           {"BZh9", "`bzip2 -dc"},
           {"\xfd\x37zXZ", "`xz -dc"},
           {"\x28\xb5\x2f\xfd", "`zstd -dc"},
           {"7z\xbc\xaf\x27\x1c", "`7z x`"},
           {"\xff\xfe{", "it is text in UTF-16"},
           {{"\xfe\xff\0{", 4}, "it is text in UTF-16"}}) {
    EXPECT_THAT(foreign_file(begin, "unknown"), ::testing::HasSubstr(what));
  }
  // A tar file, and a record of CIFAR, may begin with any character.
  const std::string name("<a>.jpg\0\0", 9), record("\t<\0", 3);
  for (const std::string& begin :
       std::vector<std::string>{"", " \n", "{}", "\xff\xd8\xff", "PK", "version 2", name, record}) {
    EXPECT_EQ(foreign_file(begin), "");
    EXPECT_EQ(foreign_file(begin, "unknown"), "unknown");
  }
}

TEST(RandomTest, IdentifiersAreSixteenDigitsAndDiffer) {
  EXPECT_EQ(random_id().size(), 16u);
  EXPECT_NE(random_id(), random_id());
}

TEST(ShellTest, RunsACommandAndReturnsItsOutput) {
  EXPECT_EQ(run_shell("echo a; echo b; exit 3"), std::pair(3, std::string("a\nb")));
  EXPECT_EQ(run_shell("kill -9 $$").first, -1);
}

TEST(HeldPortTest, IsGivenToNothingElseWhileItIsHeld) {
  const auto held = HeldPort::hold(0);
  ASSERT_TRUE(held);
  EXPECT_GT(held->port(), 0);
  const auto again = HeldPort::hold(held->port());
  ASSERT_TRUE(again) << "a store that sets SO_REUSEADDR can still bind it";
  const UniqueFd listener = bind_all_addresses(held->port());
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_FALSE(HeldPort::hold(held->port())) << "it is in use";
}

TEST(UniqueFdTest, ClosesOnceAndMoves) {
  const int number = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd first(number);
    UniqueFd second(std::move(first));
    EXPECT_EQ(second.get(), number);
    first = std::move(second);
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));
}

}  // namespace
