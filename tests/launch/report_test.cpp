#include "output/failure_report.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <cstdlib>
#include <fstream>

#include "common/processes.h"

namespace syncbn::launch {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int exited(int code) {
  return code << 8;
}

TEST(FailureReportTest, SaysWhatIsKnown) {
  setenv("TZ", "UTC", 1);
  FailureReport report;
  report.rank = 5;
  report.local_rank = 1;
  report.host = "box";
  report.pid = 42;
  report.argv = {"prog", "a b"};
  report.wait_status = exited(3);
  report.seconds_after_start = 2.25;
  report.stderr_tail = {"one", "two"};
  report.error_message = "ValueError: bad";
  report.error_file = "/tmp/e.json";
  report.failed_too = {"rank 3 (exit code 1)"};
  report.ended = {"rank 0 (killed by signal 15)", "rank 1 (exit code 0)"};
  EXPECT_EQ(render_report(report),
            "syncbn-launch: rank 5 failed: exit code 3\n"
            "  worker      rank 5, local rank 1, pid 42, host box\n"
            "  command     prog 'a b'\n"
            "  time        1970-01-01 00:00:00, 2.2 s after the start\n"
            "  error       (from /tmp/e.json)\n"
            "    ValueError: bad\n"
            "  stderr      (its last 2 lines)\n"
            "    one\n"
            "    two\n"
            "  failed too  rank 3 (exit code 1)\n"
            "  then ended  rank 0 (killed by signal 15), rank 1 (exit code 0)\n");
}

TEST(FailureReportTest, IsOneLineForAUsageError) {
  FailureReport report;
  report.wait_status = exited(2);
  report.stderr_tail = {"said already"};
  EXPECT_EQ(render_report(report),
            "syncbn-launch: rank 0 exited with 2 (usage or configuration error; see the message "
            "above)\n");
}

TEST(FailureReportTest, DoesNotRepeatATailThatWasShown) {
  FailureReport report;
  report.wait_status = exited(3);
  report.stderr_tail = {"said already"};
  report.tail_was_shown = true;
  EXPECT_THAT(render_report(report), Not(HasSubstr("said already")));
  EXPECT_THAT(json_report(3, 0, report), HasSubstr("said already"));
}

TEST(FailureReportTest, DoesNotRepeatAnErrorMessageThatIsOnStderr) {
  FailureReport report;
  report.wait_status = exited(3);
  report.error_message = "bad\nworse";
  report.stderr_tail = {"program: error: bad", "worse"};
  EXPECT_THAT(render_report(report), Not(HasSubstr("(from ")));
  report.stderr_tail = {"worse"};
  EXPECT_THAT(render_report(report), HasSubstr("(from "));
  report.error_message = "\nbelow an empty line";
  EXPECT_THAT(render_report(report), HasSubstr("below an empty line"));
}

TEST(FailureReportTest, DoesNotShowWarningsAsTheReason) {
  FailureReport report;
  report.wait_status = SIGKILL;
  report.stderr_tail = {"[W1127 06:00:00.123456789 socket.cpp:1] slow",
                        "I1127 06:00:00.123456 7 main.cc:1] started"};
  EXPECT_THAT(render_report(report), Not(HasSubstr("stderr")));
  for (const char* line : {"out of paper", "I am out of paper", "W of Wien", "[Warning]", ""}) {
    auto other = report;
    other.stderr_tail.insert(other.stderr_tail.begin(), line);
    EXPECT_THAT(render_report(other), HasSubstr(fmt::format("(its last 3 lines)\n    {}\n", line)));
  }
}

TEST(FailureReportTest, ShowsAsMuchOfAnErrorMessageAsAPersonReads) {
  FailureReport report;
  report.wait_status = exited(3);
  report.error_file = "/tmp/e.json";
  for (int i = 0; i < 100'000; ++i) report.error_message += fmt::format("line {}\n", i);
  EXPECT_THAT(render_report(report),
              AllOf(HasSubstr("    line 0\n"),
                    EndsWith("    line 39\n    [cut here; the full message is in /tmp/e.json]\n")));
  report.error_message = std::string(100'000, 'x');
  EXPECT_LT(render_report(report).size(), 10'000U);
}

TEST(FailureReportTest, ShowsAnErrorMessageWithoutWhatATerminalWouldObey) {
  FailureReport report;
  report.wait_status = exited(3);
  report.error_message = "\x1b]0;title\x07 \tcaf\u00e9\r\n\xff";
  EXPECT_THAT(render_report(report),
              HasSubstr("    \\x1b]0;title\\x07 \tcaf\u00e9\\x0d\n    \\xff\n"));
}

TEST(FailureReportTest, CutsAMessageBetweenLinesAndCharacters) {
  const std::string note = "\n[cut here; the full message is in f]";
  EXPECT_EQ(cut_message("a\nb\n", "f", 100, 2), "a\nb\n");
  EXPECT_EQ(cut_message("a\nb\nc", "f", 100, 2), "a\nb" + note);
  EXPECT_EQ(cut_message("abc\ndef", "f", 5), "abc\nd" + note);
  EXPECT_EQ(cut_message("a\u00e9\u00e9", "f", 2), "a" + note);
  EXPECT_EQ(cut_message("", "f", 5), "");
}

}  // namespace
}  // namespace syncbn::launch
