#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/train/trainer.h>

namespace syncbn::train {

/// How long a rank waits before it exits quietly. When one rank exits, the launcher ends the
/// others, and the rank that reports the error needs time to do so.
inline constexpr auto kQuietExitDelay = std::chrono::seconds(10);

bool is_rank_0();

/// Rank 0 calls `work` and every rank returns its result. Every rank calls it.
/// @throws what `work` throws on rank 0, and QuietExit with its exit code on the others;
///   base::UnavailableError when a peer fails.
std::string on_rank_0(const std::function<std::string()>& work);

/// on_rank_0() for work without a result.
void do_on_rank_0(const std::function<void()>& work);

/// For work that may fail on some ranks only. Every rank calls it.
/// @throws what `work` throws, on the first rank where it fails; QuietExit with its exit code on
///   the others; base::UnavailableError when a peer fails
void on_each_rank(const std::function<void()>& work);

/// For work that every rank does and that fails on every rank alike: only rank 0 throws the
/// base::UserError, the others QuietExit.
template <class Work>
auto report_on_rank_0(const Work& work) {
  try {
    return work();
  } catch (const base::UserError& error) {
    if (is_rank_0()) throw;
    throw QuietExit{error.exit_code()};
  }
}

}  // namespace syncbn::train
