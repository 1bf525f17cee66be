#include <gtest/gtest.h>
#include <syncbn/base/log.h>
#include <syncbn/base/threads.h>
#include <sys/resource.h>

#include <cstdlib>

namespace {

// Without address space for its stack, a thread fails to start as under `ulimit -u`, which does not
// limit root.
TEST(ThreadsTest, ThreadsThatCannotStartAreAnErrorThatNamesTheLimit) {
  const auto check = [](int count) {
    const rlimit limit{.rlim_cur = rlim_t{256} << 20, .rlim_max = RLIM_INFINITY};
    ::setrlimit(RLIMIT_AS, &limit);
    std::exit(syncbn::base::run_main("train", [count] {
      syncbn::base::check_threads(count);
      return 0;
    }));
  };
  EXPECT_EXIT(check(2), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(check(200), ::testing::ExitedWithCode(75),
              "train: error: cannot start 200 threads: Resource temporarily unavailable; this user "
              "may have .* \\(ulimit -u\\)");
}

}  // namespace
