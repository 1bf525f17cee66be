#pragma once

#include <syncbn/base/error.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/clock.h"
#include "job/job_messages.h"

namespace syncbn::launch {

/// A node's link to the leader of its job: in this process (LocalLink, Coordinator), over TCP
/// (TcpLink), or to torchrun's agent in its place (TorchrunLink). All work is done in handle() and,
/// for a leader in this process, in send(); next() then returns what has arrived. Not thread-safe.
class NodeLink {
 public:
  NodeLink() = default;
  virtual ~NodeLink() = default;
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  /// Call handle() when fd() is readable, unless it is negative, and at due(). Do not wait while
  /// has_news().
  virtual int fd() const = 0;
  virtual Clock::time_point due() const = 0;
  virtual void handle() = 0;

  /// The leader's next message. A line for the user is a Waiting. Before a Start,
  /// Assignment::job_id is empty if torchrun runs node 0.
  std::optional<ToNode> next() {
    if (inbox_.empty()) return std::nullopt;
    const ToNode message = std::move(inbox_.front());
    inbox_.pop_front();
    return message;
  }
  bool has_news() const { return !inbox_.empty(); }
  /// The end of the job, once it is known. A Stop precedes it if workers may still run.
  const std::optional<Finish>& finish() const { return finish_; }
  /// Sends a message to the leader.
  virtual void send(const FromNode& message) = 0;
  /// A signal ends this launcher: the node leaves the job if nodes may change; else the job ends.
  virtual void report_signal(const JobFailure& end) { send(EndJob{end}); }
  /// All workers of this node have ended.
  virtual void report_end(int attempt) { send(Ended{attempt}); }
  /// Answers AskRecords, before Records.
  void report_record(int question, const RankMemory& rank) {
    auto record = rank.read();
    if (!record || !shorten(*record, RecordQuota::of(record->world_size))) return;
    send(Record{question, *std::move(record)});
  }
  /// Tells the others that this process is about to be stopped, so that they do not take it for
  /// lost.
  virtual void pause() { send(Pause{}); }

  /// Whether the leader runs here: other nodes need this launcher until finish().
  virtual bool leads() const { return false; }
  /// Whether the leader's process is stopped, as by Ctrl-Z.
  virtual bool is_paused() const { return false; }
  /// The link to use in place of this one, if node 0 turns out to be torchrun's.
  virtual std::unique_ptr<NodeLink> take_successor() { return nullptr; }
  /// In the launcher of the leader: the flight records of all ranks after an attempt that failed,
  /// before its consequence is known.
  virtual std::optional<FlightFile> take_records() { return std::nullopt; }

 protected:
  void add(ToNode message) { inbox_.push_back(std::move(message)); }
  void say(std::string line) { add(Waiting{std::move(line)}); }
  /// The end of the job, or of this node's part in it.
  virtual void end(const JobFailure& failure) {
    if (finish_) return;
    finish_ = Finish{failure};
    add(Stop{failure.exit_code != base::kExitOk, failure});
  }
  void end(int exit_code, const std::string& what) {
    end(job_failure(/*attempt=*/-1, exit_code, what));
  }

 private:
  std::deque<ToNode> inbox_;
  std::optional<Finish> finish_;
};

}  // namespace syncbn::launch
