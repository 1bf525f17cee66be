#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::test {

/// How a program ended.
struct ProgramResult {
  int exit_code = -1;  ///< 128 + N when signal N ended it
  std::string out;
  std::string err;
};

struct RunProgramOptions {
  std::map<std::string, std::string> env = {};  ///< set on top of the test's own environment
  std::vector<std::string> unset = {};          ///< taken out of it
  std::string cwd = {};                         ///< empty: the test's own folder
  double timeout_seconds = 200;                 ///< then it is killed and the test fails
};

/// A started program. stdin is /dev/null; stdout and stderr are captured separately. It runs in a
/// process group of its own, which is killed with this object and when the test itself is killed.
/// argv[0] without a slash is looked up in PATH. Not thread-safe.
class Program {
 public:
  explicit Program(const std::vector<std::string>& argv, const RunProgramOptions& options = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  void send_signal(int signal) const;
  bool running();

  /// What it has written so far.
  const std::string& out();
  const std::string& err();

  /// Makes its pipes so small that it cannot get far ahead of a test that does not read them.
  void limit_lead() const;

  /// Waits until `done()` holds. If the program ends before, or the time is up, fails the test and
  /// returns false.
  bool wait_until(const std::function<bool()>& done);

  /// Like wait_until(): until it has written this text.
  bool wait_for_out(const std::string& text);
  bool wait_for_err(const std::string& text);

  /// Waits for its end. Kills a program that is too slow and fails the test.
  ProgramResult wait();

 private:
  void read_available(int timeout_ms);
  void kill_group() const;

  double timeout_seconds_;
  pid_t pid_ = -1;
  base::UniqueFd pidfd_;
  base::UniqueFd out_fd_;
  base::UniqueFd err_fd_;
  std::optional<int> exit_code_;
  std::string command_;
  std::string out_;
  std::string err_;
};

/// Starts a program and waits for its end.
ProgramResult run_program(const std::vector<std::string>& argv,
                          const RunProgramOptions& options = {});

}  // namespace syncbn::test
