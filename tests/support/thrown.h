#pragma once

#include <gtest/gtest.h>

#include <string>

namespace syncbn::test {

/// The message of the Exception that `body` throws. Fails the test if it throws none.
template <class Exception, class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace syncbn::test
