#include "common/descriptors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <climits>
#include <functional>
#include <vector>

namespace syncbn::launch {
namespace {

// Tests both ways of closing descriptors, in a child process that needs no other ones.
class DescriptorsTest
    : public testing::TestWithParam<std::function<void(unsigned, unsigned, Closing)>> {};

int flags_of(int fd) {
  return ::fcntl(fd, F_GETFD);
}

TEST_P(DescriptorsTest, ARangeIsClosedOrMarkedAndTheRestStays) {
  const auto check = [&] {
    for (const int fd : {20, 21, 22, 300}) ::dup2(STDERR_FILENO, fd);
    GetParam()(21, 22, Closing::kOnExec);
    const bool is_marked = flags_of(20) == 0 && flags_of(21) == FD_CLOEXEC &&
                           flags_of(22) == FD_CLOEXEC && flags_of(300) == 0;
    GetParam()(21, UINT_MAX, Closing::kNow);
    const bool is_closed = flags_of(20) == 0 && flags_of(21) == -1 && flags_of(300) == -1;
    return (is_marked ? 0 : 1) + (is_closed ? 0 : 2);
  };
  EXPECT_EXIT(::_exit(check()), testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(ByTheKernelAndByList, DescriptorsTest,
                         testing::Values(&close_descriptors, &close_listed));

TEST(WatchSetTest, TellsWhichDescriptorsAreReady) {
  std::vector<Pipe> pipes;
  WatchSet set("cannot watch pipes");
  for (int i = 0; i < 4; ++i) {
    pipes.push_back(Pipe::make());
    set.add(pipes.back().reader.get());
  }
  EXPECT_THAT(set.ready(4), testing::IsEmpty());
  for (const size_t i : {3U, 1U}) ASSERT_EQ(::write(pipes[i].writer.get(), "x", 1), 1);
  EXPECT_THAT(set.ready(4), testing::ElementsAre(pipes[1].reader.get(), pipes[3].reader.get()));
  EXPECT_THAT(set.ready(1), testing::SizeIs(1));
  set.change(pipes[1].reader.get(), EPOLLOUT);
  set.remove(pipes[3].reader.get());
  EXPECT_THAT(set.ready(4), testing::IsEmpty());
}

}  // namespace
}  // namespace syncbn::launch
