// Feeds bytes to both ends of a measured connection of --preflight. The first byte selects the end.
#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>

#include "preflight/link_check.h"
#include "require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace syncbn;
  // Each answer uses a part of the socket's buffer.
  constexpr size_t kMaxBytes = 50 * sizeof(int64_t) + 1;
  constexpr size_t kMaxCommands = 100;
  if (size == 0 || size > kMaxBytes) return 0;
  std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const bool is_server = data[0] % 2 == 0;
  if (is_server) bytes = bytes.substr(0, kMaxCommands);
  std::array<int, 2> ends{};
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
  base::UniqueFd ours(ends[0]);
  const base::UniqueFd theirs(ends[1]);
  require(::send(theirs.get(), bytes.data(), bytes.size(), 0) == std::ssize(bytes));
  ::shutdown(theirs.get(), SHUT_WR);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  if (is_server) {
    launch::answer_probe(ours.get(), deadline);
    return 0;
  }
  // The answers may end too early.
  may_refuse<base::UnavailableError>([&] {
    const auto trip = launch::LinkProbe(std::move(ours), deadline).measure_trip();
    require(trip.seconds >= 0 && std::isfinite(trip.clock_ahead));
  });
  return 0;
}
