#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/plain_message.h>

namespace syncbn::dist::detail {

/// Call it in a handler: throws error_of(exit_code, message) with the exception nested. Rethrows
/// the errors of a lost peer or of memory unchanged, because the stage or replica did not cause
/// them.
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
