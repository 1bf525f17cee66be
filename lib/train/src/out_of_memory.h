#pragma once

#include <exception>

namespace syncbn::train {

/// What memory is wanted for.
enum class MemoryFor {
  kMaking,     ///< data and model, whose sizes are the configuration's: a mistake in it
  kFirstStep,  ///< as well: as much is needed in each step
  kLater,      ///< there was as much before, so something else has taken it
};

/// When the error says that memory is short: @throws base::UserError, or base::UnavailableError
/// for kLater. Otherwise returns.
void throw_if_out_of_memory(MemoryFor purpose, const std::exception& error);

/// Does `work`, and says in words of the configuration that memory does not suffice for it; every
/// other error passes through.
template <class Work>
auto explain_out_of_memory(MemoryFor purpose, const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    throw_if_out_of_memory(purpose, error);
    throw;
  }
}

}  // namespace syncbn::train
