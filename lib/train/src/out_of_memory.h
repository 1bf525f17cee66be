#pragma once

#include <exception>

namespace syncbn::train {

/// @throws base::UserError when the error says that memory is short; otherwise returns.
void throw_if_out_of_memory(const std::exception& error);

/// Does `work`, and says in words of the configuration that memory does not suffice for it.
/// @throws base::UserError then; every other error passes through.
template <class Work>
auto explain_out_of_memory(const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    throw_if_out_of_memory(error);
    throw;
  }
}

}  // namespace syncbn::train
