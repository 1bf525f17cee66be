#pragma once

#include <syncbn/base/unique_fd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// Where `syncbn-launch status` or `explain` asks a launcher: an abstract Unix socket named after
/// the question and the launcher's process, which leaves no file behind. Answers only the same user
/// and root. Not thread-safe.
class StatusServer {
 public:
  static constexpr std::string_view kStatus = "syncbn-launch/";
  static constexpr std::string_view kRecords = "syncbn-launch-records/";

  /// If the system has no socket left, this object goes without one, and no client can ask.
  explicit StatusServer(std::string_view question = kStatus);

  /// Readable when a client asks; -1 without a socket.
  int fd() const { return listener_.get(); }
  /// Returns whether a new client waits for an answer.
  bool handle();
  /// Sends the text to all clients that wait, and closes their connections.
  void answer(const std::string& text);

 private:
  base::UniqueFd listener_;
  base::UniqueFd spare_;  ///< for drop_connection()
  std::vector<base::UniqueFd> asking_;
};

/// What StatusServer answers about a job.
/// @param workers of all nodes, as an array. @param silent names of nodes that have not answered.
std::string status_text(const RunContext& context, const std::string& state,
                        const nlohmann::json& workers = nlohmann::json::array(),
                        const nlohmann::json& silent = nlohmann::json::array());

/// Such an answer in words. @throws nlohmann's exceptions if it has a different form.
std::string status_in_words(const nlohmann::json& answer);

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
