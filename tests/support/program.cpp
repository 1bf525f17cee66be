#include "support/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace syncbn::test {
namespace {

using Clock = std::chrono::steady_clock;

/// The state and signals of a hanging process, and the system calls in which its threads are.
std::string place_in_kernel(pid_t pid) {
  const std::filesystem::path folder = fmt::format("/proc/{}", pid);
  std::string text;
  std::ifstream status(folder / "status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("State") || line.starts_with("Sig") || line.starts_with("Shd")) {
      text += line + "\n";
    }
  }
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator(folder / "task", gone)) {
    for (const char* name : {"comm", "wchan", "syscall", "stack"}) {
      std::ifstream file(thread.path() / name);
      text.append(std::istreambuf_iterator<char>(file), {}).append("\n");
    }
  }
  return text;
}

struct Pipe {
  base::UniqueFd reader;
  base::UniqueFd writer;
};

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) base::throw_errno("pipe");
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

[[noreturn]] void become(const std::vector<std::string>& argv, const RunProgramOptions& options,
                         int out, int err) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int null = ::open("/dev/null", O_RDONLY);
  ::dup2(null, STDIN_FILENO);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  if (null > STDERR_FILENO) ::close(null);
  for (const std::string& name : options.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : options.env) ::setenv(name.c_str(), value.c_str(), 1);
  if (!options.cwd.empty() && ::chdir(options.cwd.c_str()) != 0) {
    std::perror(options.cwd.c_str());
    ::_exit(base::kExitNotFound);
  }
  const std::vector<char*> words = base::argv_of(argv);
  ::execvp(words[0], words.data());
  std::perror(words[0]);
  ::_exit(base::kExitNotFound);
}

// Appends the content of the pipe, and closes it at the end of the stream.
void drain(base::UniqueFd& fd, std::string& into) {
  std::array<char, 65536> buffer;
  while (fd) {
    const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
    if (got < 0) return;
    if (got == 0) return fd.reset();
    into.append(buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace

Program::Program(const std::vector<std::string>& argv, const RunProgramOptions& options)
    : timeout_seconds_(options.timeout_seconds), command_(base::join(argv, " ")) {
  Pipe out = make_pipe();
  Pipe err = make_pipe();
  pid_ = ::fork();
  if (pid_ < 0) base::throw_errno("fork");
  if (pid_ == 0) become(argv, options, out.writer.get(), err.writer.get());
  ::setpgid(pid_, pid_);  // in both processes, since either may run first
  // By number: glibc 2.36 declares pidfd_open without C linkage.
  pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (!pidfd_) base::throw_errno("pidfd_open");
  out_fd_ = std::move(out.reader);
  err_fd_ = std::move(err.reader);
}

Program::~Program() {
  kill_group();
  if (!exit_code_) ::waitpid(pid_, nullptr, 0);
}

void Program::kill_group() const {
  ::kill(-pid_, SIGKILL);
}

void Program::send_signal(int signal) const {
  ASSERT_FALSE(exit_code_) << command_ << " has already ended";
  ASSERT_EQ(::kill(pid_, signal), 0);
}

void Program::limit_lead() const {
  constexpr int kBytes = 4096;  // size of each pipe, the smallest that the kernel allows
  for (const base::UniqueFd* fd : {&out_fd_, &err_fd_}) {
    ASSERT_EQ(::fcntl(fd->get(), F_SETPIPE_SZ, kBytes), kBytes);
  }
}

bool Program::running() {
  read_available(0);
  return !exit_code_;
}

const std::string& Program::out() {
  read_available(0);
  return out_;
}

const std::string& Program::err() {
  read_available(0);
  return err_;
}

bool Program::wait_until(const std::function<bool()>& done) {
  const auto deadline = after(timeout_seconds_);
  while (!done()) {
    if (exit_code_ || Clock::now() > deadline) {
      ADD_FAILURE() << command_ << (exit_code_ ? " ended" : " ran out of time")
                    << " before what was waited for\nstdout:\n"
                    << out_ << "\nstderr:\n"
                    << err_;
      return false;
    }
    read_available(20);
  }
  return true;
}

bool Program::wait_for_out(const std::string& text) {
  return wait_until([&] { return out().find(text) != std::string::npos; });
}

bool Program::wait_for_err(const std::string& text) {
  return wait_until([&] { return err().find(text) != std::string::npos; });
}

ProgramResult Program::wait() {
  const auto deadline = after(timeout_seconds_);
  while (!exit_code_) {
    if (Clock::now() > deadline) {
      ADD_FAILURE() << command_ << " still ran after " << timeout_seconds_
                    << " s: killed\nstdout:\n"
                    << out_ << "\nstderr:\n"
                    << err_ << "\n"
                    << place_in_kernel(pid_);
      kill_group();
    }
    read_available(100);
  }
  return {.exit_code = *exit_code_, .out = out_, .err = err_};
}

ProgramResult Program::end_by(int signal) {
  send_signal(signal);
  ProgramResult result = wait();
  EXPECT_EQ(result.exit_code, base::kExitSignalBase + signal) << command_ << "\n" << result.err;
  return result;
}

void Program::read_available(int timeout_ms) {
  if (!exit_code_) {
    std::array<pollfd, 3> polls{
        {{pidfd_.get(), POLLIN, 0}, {out_fd_.get(), POLLIN, 0}, {err_fd_.get(), POLLIN, 0}}};
    ::poll(polls.data(), polls.size(), timeout_ms);
    int status = 0;
    // Reaped before the pipes are read, so that the last read gets all of the output.
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_code_ =
          WIFEXITED(status) ? WEXITSTATUS(status) : base::kExitSignalBase + WTERMSIG(status);
    }
  }
  drain(out_fd_, out_);
  drain(err_fd_, err_);
}

ProgramResult run_program(const std::vector<std::string>& argv, const RunProgramOptions& options) {
  return Program(argv, options).wait();
}

}  // namespace syncbn::test
