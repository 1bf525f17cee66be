#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace syncbn::base {

/// Exit codes of every program of this project; docs/errors.md describes them for users.
/// Codes that a worker chose itself pass through the launcher unchanged.
enum ExitCode : int {
  kExitOk = 0,
  kExitUsage = 2,      ///< the user's mistake: command line, configuration, data set
  kExitInternal = 70,  ///< a broken invariant: a bug in this project (EX_SOFTWARE)
  kExitUnavailable =
      75,               ///< a peer, the network or a disk failed; a restart may help (EX_TEMPFAIL)
  kExitPreempted = 85,  ///< stopped on request after saving: the same command continues the job
  kExitCannotExecute = 126,  ///< the program was found but could not be executed
  kExitNotFound = 127,       ///< the program was not found
  kExitSignalBase = 128,     ///< 128 + N: ended by signal N
};

/// Base of the errors of this project. what() is the complete message for the user: what went
/// wrong, where, with which value, and what to do about it.
class Error : public std::runtime_error {
 public:
  int exit_code() const noexcept { return exit_code_; }

 protected:
  Error(const std::string& message, int exit_code)
      : std::runtime_error(message), exit_code_(exit_code) {}

 private:
  int exit_code_;
};

/// The user can correct it: a wrong option, a wrong configuration, a missing file. Never retried.
class UserError : public Error {
 public:
  explicit UserError(const std::string& message) : Error(message, kExitUsage) {}
};

/// A peer, the network or a disk failed. A restart may help.
class UnavailableError : public Error {
 public:
  explicit UnavailableError(const std::string& message) : Error(message, kExitUnavailable) {}
};

/// A broken invariant: a bug in this project.
class InternalError : public Error {
 public:
  explicit InternalError(const std::string& message) : Error(message, kExitInternal) {}
};

/// The exit code for an uncaught exception: an Error's own, kExitUnavailable for std::bad_alloc and
/// std::system_error, kExitInternal for all others.
int exit_code_of(const std::exception& error);

/// The end of a message about a system call that reached a limit (EMFILE, ENFILE, ENOMEM, and
/// EAGAIN of fork() and pthread_create()): the limit, its value and what to do. For ENETUNREACH,
/// advice if the loopback interface is down. Empty for other errors.
std::string limit_advice(int error);

/// strerror() and limit_advice().
std::string describe_errno(int error);

/// Throws UnavailableError for a failed system call: "<what>: <describe_errno(errno)>".
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace syncbn::base
