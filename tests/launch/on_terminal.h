#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/unique_fd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace syncbn::test {

/// A program whose stdin, stdout and stderr are its controlling terminal.
class OnTerminal {
 public:
  explicit OnTerminal(const std::vector<std::string>& argv, uint16_t columns = 60,
                      const std::map<std::string, std::string>& env = {}) {
    winsize size{};
    size.ws_col = columns;
    size.ws_row = 20;
    int master = -1;
    pid_ = ::forkpty(&master, nullptr, nullptr, &size);
    if (pid_ == 0) {
      ::setenv("TERM", "xterm", 1);
      ::setenv("OMP_NUM_THREADS", "1", 1);
      ::unsetenv("NO_COLOR");
      for (const auto& [name, value] : env) ::setenv(name.c_str(), value.c_str(), 1);
      const std::vector<char*> words = base::argv_of(argv);
      ::execv(words[0], words.data());
      ::_exit(127);
    }
    master_.reset(master);
  }
  ~OnTerminal() {
    if (exit_code_ < 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  OnTerminal(const OnTerminal&) = delete;
  OnTerminal& operator=(const OnTerminal&) = delete;

  void type(const std::string& keys) {
    ASSERT_EQ(::write(master_.get(), keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }

  /// Reads until `words` have appeared on the screen.
  bool shows(const std::string& words) {
    while (screen_.find(words) == std::string::npos) {
      if (!read_more()) {
        ADD_FAILURE() << "never shown: " << words << "\n" << screen_;
        return false;
      }
    }
    return true;
  }

  /// Hangs up, as when the terminal's window is closed or its connection is lost.
  void hang_up() { master_.reset(); }

  /// Reads all output and returns the exit code.
  int wait() {
    while (master_ && read_more()) {
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return exit_code_;
  }

  const std::string& screen() const { return screen_; }

 private:
  bool read_more() {
    pollfd ready{master_.get(), POLLIN, 0};
    if (::poll(&ready, 1, 100'000) == 0) {
      ADD_FAILURE() << "nothing more on the terminal for 100 s\n" << screen_;
      ::kill(pid_, SIGKILL);
      return false;
    }
    char buffer[4096];
    const ssize_t got = ::read(master_.get(), buffer, sizeof(buffer));
    if (got <= 0) return false;  // EIO: every process has closed the terminal
    screen_.append(buffer, static_cast<size_t>(got));
    return true;
  }

  pid_t pid_ = -1;
  int exit_code_ = -1;
  base::UniqueFd master_;
  std::string screen_;
};

}  // namespace syncbn::test
