#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/operation.h"
#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

/// Whether each rank of this host can have a CPU of its own, so that a waiting rank may spin.
/// @param segments of the ranks of one group on this host.
bool have_cpus_for_all(const std::vector<Segment>& segments);

/// Runs the operations of one group, one after the other, in the order in which they were started.
/// Nothing waits in start(): a thread that waits for an operation carries on with what is to be
/// done, so that a small exchange needs no other thread; for what nobody waits for, or what takes
/// several steps, there is a thread of its own, which is started when it is first needed.
/// Thread-safe.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Task;
  using TaskPtr = std::shared_ptr<Task>;

  /// @param segments of all ranks, by rank. @param names the ranks in the world, for messages.
  Exchange(const Layout& layout, std::vector<Segment> segments, int rank, std::vector<int> names);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(segments_.size()); }
  const Layout& layout() const { return layout_; }

  /// @param tag equal on ranks that call the same; a rank with another one is waited for in vain.
  WorkPtr start(c10d::OpType type, uint64_t tag, std::unique_ptr<Operation> operation,
                std::chrono::milliseconds timeout);

  /// The same without a c10d::Work, for what a thread waits for at once.
  TaskPtr begin(uint64_t tag, std::unique_ptr<Operation> operation,
                std::chrono::milliseconds timeout);
  /// @throws what went wrong; std::runtime_error when it is not done by the timeout, if it has one.
  void wait(const TaskPtr& task, std::chrono::milliseconds timeout);

  /// Whether nothing is under way.
  bool is_idle();

  /// Makes all that is under way, and all that comes, fail.
  void break_off() { broken_ = true; }

  /// The same, and ends the thread. The owner calls it.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  class Work;

  /// @param is_awaited a thread that waits for it sees to it.
  void enqueue(const TaskPtr& task, bool is_awaited);
  bool is_done(const TaskPtr& task);
  c10::intrusive_ptr<c10::ivalue::Future> future_of(const TaskPtr& task);

  void kick(const Lock& lock);
  void run();
  bool take_turn(Lock& lock, Clock::time_point give_up);
  bool advance(Task& task, Clock::time_point give_up);
  void put(Task& task);
  bool await(int peer, Task& task, Clock::time_point give_up);
  bool has_come(int peer, uint64_t tag) const;
  Slots slots() const { return {segments_, layout_, rank_, step_}; }

  const Layout layout_;
  const std::vector<Segment> segments_;
  const int rank_;
  const std::vector<int> names_;
  const pid_t process_;
  /// How long to look out for others while a thread waits for an operation.
  const std::chrono::nanoseconds patience_;

  std::atomic<bool> broken_ = false;
  std::atomic<int> waiting_ = 0;  ///< threads in wait()
  std::mutex mutex_;
  std::condition_variable done_;
  std::condition_variable work_;
  std::deque<TaskPtr> queue_;
  bool has_turn_ = false;  ///< some thread advances the first of the queue, without the mutex
  bool kicked_ = false;    ///< the thread has to see to the queue
  bool stop_ = false;
  uint32_t step_ = 1;  ///< of this group; belongs to whoever has the turn
  std::thread thread_;
};

}  // namespace syncbn::dist::detail::shm
