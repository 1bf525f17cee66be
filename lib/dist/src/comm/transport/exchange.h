#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/operation.h"
#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

/// Whether every rank on this host can have its own CPU, so that a waiting rank may spin.
/// @param segments of the group's ranks on this host.
bool have_cpus_for_all(const std::vector<Segment>& segments);

/// Runs the operations of one group in the order in which they were started. start() never waits.
/// The thread that waits for an operation drives it and those before it, so a small exchange needs
/// no other thread; a background thread, started when first needed, drives operations of several
/// steps and those for which no thread waits. It also runs the callbacks of futures, in the order
/// of the operations. A callback may wait for an operation that it starts: a second background
/// thread drives those, and so on. Ranks must start operations in the same order, including those
/// that callbacks start. Thread-safe.
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

  const Layout& layout() const { return layout_; }

  /// @param tag equal on ranks that make the same call. Ranks with different tags wait for each
  ///   other until the timeout.
  WorkPtr start(c10d::OpType type, uint64_t tag, std::unique_ptr<Operation> operation,
                std::chrono::milliseconds timeout);

  /// start() without a c10d::Work, for a caller that then waits.
  TaskPtr begin(uint64_t tag, std::unique_ptr<Operation> operation,
                std::chrono::milliseconds timeout);
  /// @throws the operation's error, or TimedOut after `timeout` (kNoTimeout: never).
  void wait(const TaskPtr& task, std::chrono::milliseconds timeout);

  bool is_idle();

  /// Makes all pending and later operations fail.
  void abort() { aborted_ = true; }

  /// abort(), and ends the threads; within a callback, does not wait for them. Only the owner calls
  /// it.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  class Work;

  /// @param is_awaited the caller will drive it in wait(); otherwise a background thread does.
  void enqueue(const TaskPtr& task, bool is_awaited);
  bool is_done(const TaskPtr& task);
  c10::intrusive_ptr<c10::ivalue::Future> future_of(const TaskPtr& task);

  void kick(const Task& task, const Lock& lock);
  void run(size_t depth);
  TaskPtr next_to_settle(size_t depth);
  void settle(TaskPtr task, Lock& lock);
  bool take_turn(Lock& lock, Clock::time_point give_up, std::optional<size_t> depth = {});
  bool advance(Task& task, Clock::time_point give_up);
  void publish(Task& task);
  bool await(int peer, Task& task, Clock::time_point give_up);
  bool has_published(int peer, uint64_t tag) const;
  Step step_of(const Task& task) const;

  const Layout layout_;
  const std::vector<Segment> segments_;
  const int rank_;
  const std::vector<int> names_;
  const pid_t process_;
  /// How long to spin for other ranks while a thread waits for an operation.
  const std::chrono::nanoseconds spin_time_;

  std::atomic<bool> aborted_ = false;
  std::atomic<int> waiting_ = 0;  ///< threads in wait()
  /// Guards the members below, and those of tasks that say so. No task is destroyed under it: that
  /// may free a tensor of Python, which waits for the GIL, and a thread that holds the GIL may wait
  /// for this mutex.
  std::mutex mutex_;
  std::condition_variable done_;
  std::condition_variable work_;
  std::deque<TaskPtr> queue_;
  bool has_turn_ = false;  ///< a thread advances the queue's first task, without the mutex
  bool kicked_ = false;    ///< a background thread must drive the queue
  bool stop_ = false;
  uint32_t step_ = 1;  ///< number of the group's step; only the thread that has the turn uses it
  std::vector<std::thread>
      threads_;                    ///< by the depth of the operations for which they run callbacks
  std::deque<TaskPtr> unsettled_;  ///< done, with callbacks for another thread
};

}  // namespace syncbn::dist::detail::shm
