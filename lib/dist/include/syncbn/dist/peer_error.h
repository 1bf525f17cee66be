#pragma once

#include <syncbn/base/error.h>

namespace syncbn::dist {

/// A collective failed because another rank ended, left or did not arrive in time. That rank's own
/// message, if any, has the cause.
class PeerError : public base::UnavailableError {
 public:
  using base::UnavailableError::UnavailableError;
};

}  // namespace syncbn::dist
