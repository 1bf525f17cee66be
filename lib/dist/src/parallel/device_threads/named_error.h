#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/plain_message.h>

namespace syncbn::dist::detail {

/// In a handler: throws error_of(exit_code, message) for the exception, which it nests. A lost
/// peer and out-of-memory errors are thrown unchanged, since the stage or replica is not the cause.
template <class ErrorOf>
[[noreturn]] void rethrow_named(const ErrorOf& error_of) {
  try {
    throw;
  } catch (const PeerError&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(error_of(base::exit_code_of(error), plain_message(error)));
  } catch (...) {
    std::throw_with_nested(
        error_of(base::kExitInternal, std::string("what was thrown is not a std::exception")));
  }
}

}  // namespace syncbn::dist::detail
