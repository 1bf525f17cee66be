#include <syncbn/base/threads.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <future>
#include <system_error>
#include <thread>
#include <vector>

namespace syncbn::base {

void check_threads(int count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  int error = 0;
  try {
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([ended] { ended.wait(); });
    }
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  }
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  if (error == 0) return;
  throw UnavailableError(
      fmt::format("cannot start {}: {}", counted(count, "thread"), describe_errno(error)));
}

}  // namespace syncbn::base
