#pragma once

#include <exception>

namespace syncbn::train {

enum class MemoryUse {
  kSetup,      ///< data and model: their sizes are a mistake in the configuration
  kFirstStep,  ///< likewise: every step needs as much
  kLater,      ///< memory sufficed before, so another process must have taken it
};

/// Whether an error is a lack of memory, wherever it occurs.
bool is_out_of_memory(const std::exception& error);

/// @throws base::UserError, or for kLater base::UnavailableError, if `error` is a lack of memory.
void throw_if_out_of_memory(MemoryUse use, const std::exception& error);

/// Calls `work` and turns its errors for lack of memory into advice on the configuration.
template <class Work>
auto explain_out_of_memory(MemoryUse use, const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    throw_if_out_of_memory(use, error);
    throw;
  }
}

}  // namespace syncbn::train
