#pragma once

#include <functional>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/train/trainer.h>

namespace syncbn::train {

// What rank 0 does, or says, for all ranks of the default process group.

/// Rank 0 does `work` and every rank gets its result. Every rank calls it.
/// @throws what `work` throws on rank 0, and LeaveSilently with its exit code on the others;
///   base::UnavailableError when a peer fails.
std::string on_rank_0(const std::function<std::string()>& work);

/// The same for work without a result.
void rank_0_does(const std::function<void()>& work);

/// Whether this is rank 0 of the default process group.
bool is_rank_0();

/// For work in which every rank meets the same mistake of the user's: rank 0 says it.
template <class Work>
auto said_once(const Work& work) {
  try {
    return work();
  } catch (const base::UserError& error) {
    if (is_rank_0()) throw;
    throw LeaveSilently{error.exit_code()};
  }
}

}  // namespace syncbn::train
