#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/unique_fd.h>
#include <sys/types.h>
#include <sys/un.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"
#include "common/descriptors.h"
#include "job/job_messages.h"

namespace syncbn::launch {

/// Where `syncbn-launch status` or `explain` asks a launcher: an abstract Unix socket, which leaves
/// no file behind. Answers only the same user and root. No call waits for a client. Not
/// thread-safe.
class StatusServer {
 public:
  static constexpr std::string_view kStatus = "syncbn-launch/";
  static constexpr std::string_view kRecords = "syncbn-launch-records/";

  /// If the system has no socket left, no client can ask.
  /// @throws base::UnavailableError if no descriptor is left.
  explicit StatusServer(std::string_view question = kStatus);

  /// Readable when a client asks, or can receive more of its answer.
  int fd() const { return watched_.fd(); }
  /// Sends what clients can receive, and drops those that take longer than 5 s. Returns whether a
  /// new client waits for an answer.
  bool handle();
  /// Starts to send the text to all clients that wait.
  void answer(const std::string& text);

 private:
  struct Client {
    base::Channel channel;
    std::optional<Clock::time_point> deadline;  ///< of its answer
  };
  void flush_answers();

  WatchSet watched_{"cannot watch the socket for `syncbn-launch status`"};
  base::UniqueFd listener_;
  base::UniqueFd spare_;  ///< for drop_connection()
  std::vector<Client> clients_;
};

/// Fills in the abstract address of a launcher's socket and returns its size. Its name has the
/// question, the PID namespace, because containers that share a network have PIDs of their own, and
/// the PID.
socklen_t socket_address(std::string_view question, pid_t pid, sockaddr_un& address);

/// What StatusServer answers about a job.
struct JobStatus : Status {
  ShownText run_id;
  ShownText job_id;
  pid_t pid = 0;
  int attempt = 0;
  int nodes = 0;
  ShownText state;
  ShownText program;

  std::string in_words() const;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JobStatus, run_id, job_id, pid, attempt, nodes, state, program,
                                   workers, notes)

/// A JobStatus as text.
std::string status_text(const RunContext& context, const std::string& state,
                        const Status& status = {});

/// Prints the state of the workers of each launcher of this user on this machine.
/// @param which a launcher's process id or a job's name or id; empty: all.
/// @throws base::UserError if there is no such launcher.
/// @throws base::UnavailableError if one that may be meant does not answer.
void print_status(const std::string& which);

/// An error message: the launcher does not answer, and what to do.
std::string no_answer_from(pid_t launcher);

/// The flight records of all nodes as a launcher knows them now, as a file; "" if it knows only its
/// own; empty if it does not answer.
std::optional<std::string> ask_for_records(pid_t launcher);

}  // namespace syncbn::launch
