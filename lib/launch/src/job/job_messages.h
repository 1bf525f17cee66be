#pragma once

#include <syncbn/base/error.h>
#include <syncbn/base/signal_name.h>

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "job/flight_file.h"
#include "job/hang.h"
#include "job/restart_policy.h"
#include "job/run_context.h"
#include "job/worker_state.h"

namespace syncbn::launch {

// What the launchers of a job and its leader tell each other. A message without members is its type
// alone.

/// The first failure of an attempt, or the end of the job.
/// Its rank is -1 and its status the exit code if it is no worker's.
struct JobFailure : FailureCause {
  int attempt = -1;
  int exit_code = 0;
  bool may_restart = false;
  ShownText what = {};

  /// Whether both are the same event, however each launcher words it.
  bool is(const JobFailure& other) const {
    return attempt == other.attempt && rank == other.rank && status == other.status;
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JobFailure, attempt, rank, status, step, exit_code, may_restart,
                                   what)

/// A failure that is no worker's.
inline JobFailure job_failure(int attempt, int exit_code, std::string what) {
  return {{.status = exit_code}, attempt, exit_code, /*may_restart=*/false, std::move(what)};
}
/// A signal to a launcher ends the job.
inline JobFailure ended_by_signal(int attempt, int signal) {
  return job_failure(attempt, base::kExitSignalBase + signal,
                     "ended by " + base::signal_name(signal));
}

// In the message Start.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Assignment, master_addr, master_port, job_id, agent_store,
                                   attempt, restart_count, reason, node, nodes, ranks)

// From both.

struct Alive {};
/// This process is about to be stopped, as by Ctrl-Z, and will be silent.
struct Pause {};
/// A rank's flight record, after shorten().
struct Record {
  int question = 0;
  RankRecord record;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Record, question, record)

// From a launcher.

/// A launcher's first message, about itself.
struct Hello {
  std::string job = {};    ///< --rdzv_id
  int node = -1;           ///< -1: any
  std::string nodes = {};  ///< --nnodes
  int nproc = 0;
  std::string role = {};
  ShownText host = {};
  int max_restarts = 0;
  int exit_code = 0;    ///< not 0: this launcher cannot start its workers, and ends the job
  ShownText what = {};  ///< why
  /// The host's addresses, if the job has a token: node 0 accepts clients of the store from these.
  std::vector<std::string> addresses = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Hello, job, node, nodes, nproc, role, host, max_restarts,
                                   exit_code, what, addresses)

/// The first failure among the node's workers.
struct Failed : JobFailure {};

/// All workers of the node have ended.
struct Ended {
  int attempt = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Ended, attempt)

/// A signal ends the job: the exit code and why.
struct EndJob : JobFailure {};
/// A signal takes the node out of a job whose nodes may change.
struct Leave {};
/// A worker has made no progress for `seconds`; `ends`: the culprit is to be ended.
struct Stalled {
  int attempt = 0;
  double seconds = 0;
  bool ends = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Stalled, attempt, seconds, ends)

/// Answers Inquire.
struct Workers {
  std::vector<WorkerState> workers;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Workers, workers)

/// All flight records of the node have been sent.
struct Records {
  int question = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Records, question)

/// Asks what the workers of all nodes do, for `status`.
struct AskStatus {};
/// Asks for the flight records of all nodes, for `explain PID`.
struct AskAllRecords {};

using FromNode = std::variant<Alive, Pause, Record, Hello, Failed, Ended, EndJob, Leave, Stalled,
                              Workers, Records, AskStatus, AskAllRecords>;

// From the leader.

struct Welcome {
  int64_t alive_ms = 0;
  int64_t silence_ms = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Welcome, alive_ms, silence_ms)

/// The launcher ends by itself.
struct Refuse {
  int exit_code = 0;
  ShownText message;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Refuse, exit_code, message)

/// For the user: what the leader waits for.
struct Waiting {
  ShownText message;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Waiting, message)

struct Start : Assignment {};

/// Ends the workers of an attempt.
struct Stop {
  bool failed = false;  ///< not by a signal or a change of the nodes
  JobFailure why;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Stop, failed, why)

/// The end of the job, the same on all nodes. Exit code 0: success.
struct Finish : JobFailure {};

/// What do the workers do?
struct Inquire {};
/// What the workers of all nodes do.
struct Status {
  std::vector<WorkerState> workers;
  std::vector<ShownText> notes;  ///< lines about workers that it lacks
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Status, workers, notes)

/// A node was paused, which stopped the workers' time: forgive their silence.
struct Hold {};
/// Which worker holds up the others, and what to do about it.
struct NameHang : Hang {};

struct AskRecords {
  int question = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AskRecords, question)

/// Follows the Records of all nodes to a node that has asked for them.
struct AllRecords : FlightFile {};

using ToNode = std::variant<Alive, Pause, Record, Welcome, Refuse, Waiting, Start, Stop, Finish,
                            Inquire, Status, Hold, NameHang, AskRecords, AllRecords>;

/// The types' names, in the order of the variant.
template <class Messages>
struct TypeNames;
template <>
struct TypeNames<FromNode> {
  static constexpr std::array kAll{"alive",   "pause",      "record",         "hello",   "failed",
                                   "ended",   "end",        "leave",          "stalled", "workers",
                                   "records", "ask_status", "ask_all_records"};
};
template <>
struct TypeNames<ToNode> {
  static constexpr std::array kAll{"alive",   "pause", "record", "welcome",     "refuse",
                                   "waiting", "start", "stop",   "finish",      "inquire",
                                   "status",  "hold",  "hang",   "ask_records", "all_records"};
};
template <class Messages>
constexpr const char* type_name(size_t index) {
  static_assert(TypeNames<Messages>::kAll.size() == std::variant_size_v<Messages>);
  return TypeNames<Messages>::kAll.at(index);
}

/// @param message FromNode, ToNode or NodeMessage.
template <class Messages>
std::string message_line(const Messages& message) {
  return std::visit(
      [&]<class One>(const One& one) {
        nlohmann::json json = nlohmann::json::object();
        if constexpr (!std::is_empty_v<One>) json = one;
        json["type"] = type_name<Messages>(message.index());
        return json_line(json);
      },
      message);
}

struct UnknownType : nlohmann::json::exception {
  explicit UnknownType(const std::string& type)
      : exception(0, ("unknown type of message: " + shown_text(type)).c_str()) {}
};

/// @return FromNode, ToNode or NodeMessage. @throws nlohmann's exceptions if the message has an
/// unknown type or lacks something.
template <class Messages, size_t kIndex = 0>
Messages message_in(const nlohmann::json& json) {
  if constexpr (kIndex == std::variant_size_v<Messages>) {
    throw UnknownType(json_line(json.at("type")));
  } else {
    using One = std::variant_alternative_t<kIndex, Messages>;
    if (json.at("type") != type_name<Messages>(kIndex)) {
      return message_in<Messages, kIndex + 1>(json);
    }
    if constexpr (std::is_empty_v<One>)
      return One{};
    else
      return json.get<One>();
  }
}

}  // namespace syncbn::launch
