#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "job/flight_file.h"
#include "job/restart_policy.h"
#include "job/run_context.h"
#include "job/shown_text.h"
#include "job/worker_state.h"

namespace nlohmann {

/// null: no value.
template <class T>
struct adl_serializer<std::optional<T>> {
  static void to_json(json& to, const std::optional<T>& value) {
    to = value ? json(*value) : json();
  }
  static void from_json(const json& from, std::optional<T>& value) {
    value = from.is_null() ? std::nullopt : std::optional<T>(from.get<T>());
  }
};

}  // namespace nlohmann

namespace syncbn::launch {

// What the launchers of a job and its leader tell each other. A message without members is its type
// alone.

/// The first failure of an attempt, or the end of the job.
struct JobFailure {
  int attempt = -1;
  int rank = -1;   ///< of the worker that failed; -1: another reason
  int status = 0;  ///< FailureCause::status of the worker; else the exit code
  std::optional<uint64_t> step = {};
  int exit_code = 0;
  bool may_restart = false;
  ShownText what = {};

  /// Whether both are the same event, however each launcher words it.
  bool is(const JobFailure& other) const {
    return attempt == other.attempt && rank == other.rank && status == other.status;
  }
  FailureCause cause() const { return {rank, status, step}; }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JobFailure, attempt, rank, status, step, exit_code, may_restart,
                                   what)

// In the message Start.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Assignment, master_addr, master_port, job_id, agent_store,
                                   attempt, restart_count, reason, node, nodes, ranks)

// From both.

struct Alive {
  static constexpr const char* kType = "alive";
};
/// This process is about to be stopped, as by Ctrl-Z, and will be silent.
struct Pause {
  static constexpr const char* kType = "pause";
};
/// A rank's flight record, as `text` from record_text().
struct Record {
  static constexpr const char* kType = "record";
  int question = 0;
  int rank = 0;
  std::string text;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Record, question, rank, text)

// From a launcher.

/// A launcher's first message, about itself.
struct Hello {
  static constexpr const char* kType = "hello";
  std::string job = {};  ///< --rdzv_id
  int node = -1;         ///< -1: any
  bool leads = false;
  std::string nodes = {};  ///< --nnodes
  int nproc = 0;
  std::string role = {};
  ShownText host = {};
  int max_restarts = 0;
  bool is_check = false;  ///< of --preflight, ahead of the job
  int exit_code = 0;      ///< not 0: this launcher cannot start its workers, and ends the job
  ShownText what = {};    ///< why
  /// The host's addresses, if the job has a token: node 0 accepts clients of the store from these.
  std::vector<std::string> addresses = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Hello, job, node, leads, nodes, nproc, role, host, max_restarts,
                                   is_check, exit_code, what, addresses)

/// The first failure among the node's workers.
struct Failed : JobFailure {
  static constexpr const char* kType = "failed";
};

/// All workers of the node have ended.
struct Ended {
  static constexpr const char* kType = "ended";
  int attempt = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Ended, attempt)

/// A signal ends the job.
struct EndJob {
  static constexpr const char* kType = "end";
  int exit_code = 0;
  ShownText what;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EndJob, exit_code, what)

/// A signal takes the node out of a job whose nodes may change.
struct Leave {
  static constexpr const char* kType = "leave";
};
/// A worker has made no progress for `seconds`; `ends`: the culprit is to be ended.
struct Stalled {
  static constexpr const char* kType = "stalled";
  int attempt = 0;
  double seconds = 0;
  bool ends = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Stalled, attempt, seconds, ends)

/// Answers Inquire.
struct Workers {
  static constexpr const char* kType = "workers";
  std::vector<WorkerState> workers;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Workers, workers)

/// All flight records of the node have been sent.
struct Records {
  static constexpr const char* kType = "records";
  int question = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Records, question)

/// Asks what the workers of all nodes do, for `status`.
struct AskStatus {
  static constexpr const char* kType = "ask_status";
};
/// Asks for the flight records of all nodes, for `explain PID`.
struct AskAllRecords {
  static constexpr const char* kType = "ask_all_records";
};

using FromNode = std::variant<Alive, Pause, Record, Hello, Failed, Ended, EndJob, Leave, Stalled,
                              Workers, Records, AskStatus, AskAllRecords>;

// From the leader.

struct Welcome {
  static constexpr const char* kType = "welcome";
  int64_t alive_ms = 0;
  int64_t silence_ms = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Welcome, alive_ms, silence_ms)

/// The launcher ends by itself.
struct Refuse {
  static constexpr const char* kType = "refuse";
  int exit_code = 0;
  ShownText message;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Refuse, exit_code, message)

/// For the user: what the leader waits for.
struct Waiting {
  static constexpr const char* kType = "waiting";
  ShownText message;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Waiting, message)

struct Start : Assignment {
  static constexpr const char* kType = "start";
};

/// Ends the workers of an attempt.
struct Stop {
  static constexpr const char* kType = "stop";
  bool failed = false;  ///< not by a signal or a change of the nodes
  JobFailure why;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Stop, failed, why)

/// The end of the job, the same on all nodes. Exit code 0: success.
struct Finish : JobFailure {
  static constexpr const char* kType = "finish";
};

/// What do the workers do?
struct Inquire {
  static constexpr const char* kType = "inquire";
};
/// What the workers of all nodes do.
struct Status {
  static constexpr const char* kType = "status";
  std::vector<WorkerState> workers;
  std::vector<ShownText> silent;  ///< lines about workers that it lacks
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Status, workers, silent)

/// A node was paused, which stopped the workers' time: forgive their silence.
struct Hold {
  static constexpr const char* kType = "hold";
};
/// Which worker holds up the others, and what to do about it.
struct NameHang : Hang {
  static constexpr const char* kType = "hang";
};

struct AskRecords {
  static constexpr const char* kType = "ask_records";
  int question = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AskRecords, question)

/// Follows the Records of all nodes to a node that has asked for them.
struct AllRecords : FlightFile {
  static constexpr const char* kType = "all_records";
};

using ToNode = std::variant<Alive, Pause, Record, Welcome, Refuse, Waiting, Start, Stop, Finish,
                            Inquire, Status, Hold, NameHang, AskRecords, AllRecords>;

template <class Message>
nlohmann::json as_json(const Message& message) {
  nlohmann::json json = nlohmann::json::object();
  if constexpr (!std::is_empty_v<Message>) json = message;
  json["type"] = Message::kType;
  return json;
}

/// @param messages FromNode or ToNode.
template <class Messages>
std::string message_line(const Messages& messages) {
  return std::visit([](const auto& message) { return json_line(as_json(message)); }, messages);
}

/// @return FromNode or ToNode. @throws nlohmann's exceptions if the message has an unknown type or
/// lacks something.
template <class Messages>
Messages message_in(const nlohmann::json& json) {
  const std::string& type = json.at("type").get_ref<const std::string&>();
  std::optional<Messages> found;
  const auto read = [&]<class... Each>(std::type_identity<std::variant<Each...>> /*all*/) {
    const auto try_one = [&]<class One>(std::type_identity<One> /*type*/) {
      if (type != One::kType) return;
      if constexpr (std::is_empty_v<One>)
        found = One{};
      else
        found = json.get<One>();
    };
    (try_one(std::type_identity<Each>{}), ...);
  };
  read(std::type_identity<Messages>{});
  if (!found) nlohmann::json::object().at("known type");
  return *std::move(found);
}

}  // namespace syncbn::launch
