#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::test {

using Words = std::vector<std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The result of a program.
struct ProgramResult {
  int exit_code = -1;  ///< 128 + N when signal N ended it
  std::string out;
  std::string err;
};

struct RunProgramOptions {
  std::map<std::string, std::string> env = {};  ///< added to the test's own environment
  std::vector<std::string> unset = {};          ///< removed from it
  std::string cwd = {};                         ///< empty: the test's working folder
  double timeout_seconds = 200;                 ///< after which it is killed and the test fails
};

/// A started program. stdin is /dev/null; stdout and stderr are captured separately. The program
/// runs in its own process group, which is killed when this object is destroyed or the test is
/// killed. argv[0] without a slash is looked up in PATH. Not thread-safe.
class Program {
 public:
  explicit Program(const std::vector<std::string>& argv, const RunProgramOptions& options = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  void send_signal(int signal) const;
  bool running();

  /// The output so far.
  const std::string& out();
  const std::string& err();

  /// Makes the pipes so small that the program cannot get far ahead of a test that does not read.
  void limit_lead() const;

  /// Waits until `done()` holds. Fails the test and returns false if the program ends or the time
  /// is up first.
  bool wait_until(const std::function<bool()>& done);

  /// Like wait_until(): until it has written this text.
  bool wait_for_out(const std::string& text);
  bool wait_for_err(const std::string& text);

  /// Waits for the program's end. Kills a program that exceeds its time, and fails the test.
  ProgramResult wait();

  /// Sends this signal, waits for the program's end and expects exit code 128 + signal.
  ProgramResult end_by(int signal);

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
