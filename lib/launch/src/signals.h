#pragma once

#include <syncbn/base/unique_fd.h>

#include <optional>
#include <vector>

namespace syncbn::launch {

/// The signals that the launcher acts on, as a descriptor to poll: they are blocked from
/// construction on. SIGHUP is left alone where it was ignored (nohup), and SIGPIPE is ignored.
class Signals {
 public:
  /// @param ending those that end the run.
  explicit Signals(std::vector<int> ending);

  int fd() const { return fd_.get(); }
  std::optional<int> next();
  bool ends(int signal) const;

  /// Stops this process as Ctrl-Z does and returns when it is continued.
  static void stop_self();

 private:
  std::vector<int> ending_;
  base::UniqueFd fd_;
};

}  // namespace syncbn::launch
