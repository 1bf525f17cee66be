// main() of all test programs. Each test runs in its own process, forked from this one, which has
// loaded libtorch and started no thread. So a test that crashes or hangs does not affect others.
//
//   PROGRAM [GoogleTest's options] [--timeout=SECONDS] [--prefix=TEXT] [--here]
//
// --timeout bounds each test, --prefix is put before its name in reports, and --here runs the test
// that --gtest_filter selects in this process, for a debugger.
// SYNCBN_TEST_REPORT names a file to which a line per result is appended: status, name and reason,
// separated by tabs. Tests get SYNCBN_SUITE_FOLDER, a folder that all tests of this invocation
// share (support/once.h).
#include <fcntl.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "support/temp_folder.h"

namespace {

constexpr int kExitSkipped = 77;  // ctest's SKIP_RETURN_CODE

struct Options {
  int timeout_seconds = 60;
  std::string prefix;
  bool here = false;
};

bool matches_any(const std::string& patterns, const std::string& name) {
  for (size_t begin = 0; begin <= patterns.size();) {
    const size_t end = std::min(patterns.find(':', begin), patterns.size());
    if (::fnmatch(patterns.substr(begin, end - begin).c_str(), name.c_str(), 0) == 0) return true;
    begin = end + 1;
  }
  return false;
}

/// The tests that --gtest_filter selects; disabled ones only with --gtest_also_run_disabled_tests.
std::vector<std::string> selected_tests() {
  const std::string filter = ::testing::GTEST_FLAG(filter);
  const size_t dash = std::min(filter.find('-'), filter.size());
  const std::string wanted = dash == 0 ? "*" : filter.substr(0, dash);
  const std::string unwanted = dash < filter.size() ? filter.substr(dash + 1) : "";
  std::vector<std::string> names;
  const auto& all = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const auto& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const std::string name = fmt::format("{}.{}", suite.name(), suite.GetTestInfo(j)->name());
      const bool disabled = name.find("DISABLED_") != std::string::npos;
      if (disabled && !::testing::GTEST_FLAG(also_run_disabled_tests)) continue;
      if (matches_any(wanted, name) && !(dash < filter.size() && matches_any(unwanted, name))) {
        names.push_back(name);
      }
    }
  }
  return names;
}

void report(const char* status, const std::string& name, std::string reason = "") {
  const char* path = std::getenv("SYNCBN_TEST_REPORT");
  if (path == nullptr) return;
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  const std::string line = fmt::format("{}\t{}\t{}\n", status, name, reason);
  const int fd = ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  // A single write() in append mode, so that lines of several programs do not mix.
  if (fd < 0 || ::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    std::perror(path);
  }
  ::close(fd);
}

class SkipReason : public ::testing::EmptyTestEventListener {
 public:
  std::string text = "no reason given";

 private:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.skipped()) text = result.message();
  }
};

/// Runs the test in this process. @return the exit code
int run_here(const std::string& name, const Options& options) {
  ::testing::GTEST_FLAG(filter) = name;
  auto* const reason = new SkipReason;  // GoogleTest deletes it
  ::testing::UnitTest::GetInstance()->listeners().Append(reason);
  const int code = RUN_ALL_TESTS();
  const auto& result = *::testing::UnitTest::GetInstance();
  if (code == 0 && result.successful_test_count() + result.skipped_test_count() != 1) {
    std::printf("%s did not run\n", name.c_str());
    return 1;
  }
  if (code != 0) return code;
  const bool skipped = result.skipped_test_count() == 1;
  report(skipped ? "skipped" : "passed", options.prefix + name, skipped ? reason->text : "");
  return skipped ? kExitSkipped : 0;
}

/// Waits for the child, and kills it at the deadline. @return its wait status
int wait_for(pid_t pid, int timeout_seconds, bool& timed_out) {
  const auto handle = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  pollfd ended{handle, POLLIN, 0};
  timed_out = ::poll(&ended, 1, timeout_seconds * 1000) == 0;
  ::close(handle);
  // Also kills processes that the test left in its process group.
  if (timed_out) ::kill(-pid, SIGKILL);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  ::kill(-pid, SIGKILL);
  return status;
}

/// @return the test's exit code; 1 if it crashed or timed out
int run_forked(const std::string& name, const Options& options) {
  std::fflush(nullptr);
  const auto start = std::chrono::steady_clock::now();
  const pid_t pid = ::fork();
  if (pid < 0) {
    std::perror("fork");
    return 1;
  }
  if (pid == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int code = run_here(name, options);
    std::fflush(nullptr);
#ifdef __SANITIZE_ADDRESS__
    std::exit(code);  // the sanitizer checks for leaks at exit
#else
    std::quick_exit(code);  // libtorch's destructors take longer than most tests
#endif
  }
  ::setpgid(pid, pid);
  bool timed_out = false;
  const int status = wait_for(pid, options.timeout_seconds, timed_out);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  std::string reason;
  if (timed_out) {
    reason = fmt::format("timed out after {} s", options.timeout_seconds);
  } else if (WIFSIGNALED(status)) {
    reason = fmt::format("killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  }
  const int code = WIFEXITED(status) && !timed_out ? WEXITSTATUS(status) : 1;
  const bool good = code == 0 || code == kExitSkipped;
  if (!good) report("failed", options.prefix + name, reason);
  std::printf("%s %s%s (%lld ms)%s%s\n",
              code == 0 ? "pass"
              : good    ? "skip"
                        : "FAIL",
              options.prefix.c_str(), name.c_str(), static_cast<long long>(took.count()),
              reason.empty() ? "" : ": ", reason.c_str());
  return good ? code : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Banners for each test would bury the failures.
  std::string brief = "--gtest_brief=1";
  std::vector<char*> words(argv, argv + argc);
  words.insert(words.begin() + 1, brief.data());
  words.push_back(nullptr);
  argv = words.data();
  ++argc;
  ::testing::InitGoogleMock(&argc, argv);
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--timeout=")) {
      options.timeout_seconds = std::stoi(argument.substr(10));
    } else if (argument.starts_with("--prefix=")) {
      options.prefix = argument.substr(9);
    } else if (argument == "--here") {
      options.here = true;
    } else {
      std::fprintf(stderr, "%s: unknown option %s\n", argv[0], argv[i]);
      return 2;
    }
  }
  if (::testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  const std::vector<std::string> names = selected_tests();
  if (names.empty()) {
    std::fprintf(stderr, "%s: no test matches the filter\n", argv[0]);
    return 2;
  }
  if (options.here && names.size() > 1) {
    std::fprintf(stderr, "%s: --here takes one test, the filter selects %zu\n", argv[0],
                 names.size());
    return 2;
  }
  const syncbn::test::TempFolder shared;
  ::setenv("SYNCBN_SUITE_FOLDER", shared.path().c_str(), /*replace=*/1);
  if (options.here) return run_here(names.front(), options);
  int failed = 0;
  int skipped = 0;
  for (const std::string& name : names) {
    const int code = run_forked(name, options);
    skipped += code == kExitSkipped ? 1 : 0;
    failed += code != 0 && code != kExitSkipped ? 1 : 0;
  }
  std::printf("%zu tests, %d failed, %d skipped\n", names.size(), failed, skipped);
  if (failed > 0) return 1;
  return skipped == static_cast<int>(names.size()) ? kExitSkipped : 0;
}
