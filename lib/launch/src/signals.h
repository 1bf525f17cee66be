#pragma once

#include <syncbn/base/unique_fd.h>

#include <optional>

namespace syncbn::launch {

/// The signals that the launcher acts on, as a descriptor to poll: they are blocked from
/// construction on. SIGHUP is left alone where it was ignored (nohup), and SIGPIPE is ignored.
class Signals {
 public:
  Signals();

  int fd() const { return fd_.get(); }
  std::optional<int> next();

  /// Stops this process as Ctrl-Z does and returns when it is continued.
  static void stop_self();

 private:
  base::UniqueFd fd_;
};

}  // namespace syncbn::launch
