#include "transport/exchange.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sched.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/signal_mask.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "transport/timeouts.h"

namespace syncbn::dist::detail::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How long to spin for a rank that has its own core: ranks with equal work drift apart by about
// this much between two layers, and on virtual machines a core wakes up late. After kYieldAfter the
// spinning thread yields. Ranks that share cores must not spin: the awaited rank could not run.
constexpr nanoseconds kSpinTime = milliseconds(2);
constexpr nanoseconds kShortSpinTime = std::chrono::microseconds(5);
constexpr nanoseconds kYieldAfter = std::chrono::microseconds(50);
constexpr int kLooksPerClock = 32;
// Interval at which a sleeping rank checks whether the group was aborted.
constexpr nanoseconds kMaxSleep = milliseconds(50);

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

/// Sleeps while `word` is `value`, for at most `limit`.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t value, nanoseconds limit) {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec time{.tv_sec = limit.count() / kSecond, .tv_nsec = limit.count() % kSecond};
  // Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Nesting depth of the futures' callbacks that this thread runs.
thread_local size_t t_depth = 0;

/// While one lives, this thread runs a callback of a task of this depth.
class DepthGuard {
 public:
  explicit DepthGuard(size_t depth)
      : former_(std::exchange(t_depth, std::max(t_depth, depth) + 1)) {}
  ~DepthGuard() { t_depth = former_; }
  DepthGuard(const DepthGuard&) = delete;
  DepthGuard& operator=(const DepthGuard&) = delete;

 private:
  size_t former_;
};

std::runtime_error error_of_abort() {
  return std::runtime_error("the exchange through shared memory was aborted");
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

bool have_cpus_for_all(const std::vector<Segment>& segments) {
  const auto& first = segments.front().header().cpus;
  auto all = first;
  bool are_bound = false;
  for (const Segment& segment : segments) {
    all |= segment.header().cpus;
    are_bound |= segment.header().cpus != first;
  }
  // Ranks outside this group use the same CPUs, unless ranks are bound to CPUs.
  const auto others = are_bound ? std::nullopt : base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20);
  const auto ranks = std::max(static_cast<int64_t>(segments.size()), others.value_or(0));
  return ranks <= base::usable_cpus(all.count());
}

struct Exchange::Task {
  Task(std::unique_ptr<Operation> operation, uint64_t tag, milliseconds timeout)
      : operation(std::move(operation)),
        tag(tag),
        timeout(timeout),
        deadline(Clock::now() + timeout) {}

  const std::unique_ptr<Operation> operation;
  const uint64_t tag;
  const milliseconds timeout;
  const Clock::time_point deadline;
  const size_t depth = t_depth;  ///< nesting depth of callbacks in which it was started

  // Only the thread that has the turn uses these.
  int64_t step = 0;
  std::optional<Clock::time_point> waits_since;  ///< in this step
  bool is_published = false;
  int peer = 0;  ///< the ranks before it have published

  // Guarded by the mutex.
  bool is_done = false;
  std::exception_ptr error;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  /// Set until the task is done (the flight recorder's pointer is weak). Null after begin().
  WorkPtr work;

  void settle(const c10::intrusive_ptr<c10::ivalue::Future>& settled) const {
    if (error) {
      settled->setError(error);
    } else {
      settled->markCompleted(c10::IValue(operation->result()));
    }
  }
};

class Exchange::Work : public c10d::Work {
 public:
  Work(std::shared_ptr<Exchange> exchange, TaskPtr task, c10d::OpType type)
      : c10d::Work(exchange->rank_, type), exchange_(std::move(exchange)), task_(std::move(task)) {}

  bool isCompleted() override { return exchange_->is_done(task_); }
  bool isSuccess() const override { return exchange_->is_done(task_) && !task_->error; }
  std::exception_ptr exception() const override {
    return exchange_->is_done(task_) ? task_->error : nullptr;
  }
  std::vector<at::Tensor> result() override { return task_->operation->result(); }
  void synchronize() override {}
  bool wait(milliseconds timeout) override {
    exchange_->wait(task_, timeout);
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return exchange_->future_of(task_);
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
  const TaskPtr task_;
};

Exchange::Exchange(const Layout& layout, std::vector<Segment> segments, int rank,
                   std::vector<int> names)
    : layout_(layout),
      segments_(std::move(segments)),
      rank_(rank),
      names_(std::move(names)),
      process_(::getpid()),
      spin_time_(have_cpus_for_all(segments_) ? kSpinTime : kShortSpinTime) {}

Exchange::~Exchange() {
  stop();
}

bool Exchange::is_idle() {
  if (::getpid() != process_) return true;
  const Lock lock(mutex_);
  return queue_.empty();
}

void Exchange::stop() {
  abort();
  // A forked child does not have these threads, and one of its parent may have held the mutex.
  if (::getpid() != process_) {
    for (std::thread& thread : threads_) thread.detach();
    return threads_.clear();
  }
  Lock lock(mutex_);
  stop_ = true;
  work_.notify_all();
  while (!queue_.empty()) {
    if (has_turn_) {
      done_.wait(lock);
    } else {
      take_turn(lock, Clock::now());
    }
  }
  lock.unlock();
  for (std::thread& thread : threads_) {
    // A callback that calls stop() runs on one of these threads, and others may wait for it.
    t_depth > 0 ? thread.detach() : thread.join();
  }
  threads_.clear();
}

Exchange::WorkPtr Exchange::start(c10d::OpType type, uint64_t tag,
                                  std::unique_ptr<Operation> operation, milliseconds timeout) {
  const auto task = std::make_shared<Task>(std::move(operation), tag, timeout);
  task->work = c10::make_intrusive<Work>(shared_from_this(), task, type);
  auto work = task->work;
  enqueue(task, /*is_awaited=*/false);
  return work;
}

Exchange::TaskPtr Exchange::begin(uint64_t tag, std::unique_ptr<Operation> operation,
                                  milliseconds timeout) {
  auto task = std::make_shared<Task>(std::move(operation), tag, timeout);
  enqueue(task, /*is_awaited=*/true);
  return task;
}

void Exchange::enqueue(const TaskPtr& task, bool is_awaited) {
  const Lock lock(mutex_);
  if (stop_) {  // another thread called stop() while this one made the call
    task->error = std::make_exception_ptr(error_of_abort());
    task->is_done = true;
    task->work.reset();
    return;
  }
  const bool is_first = queue_.empty();
  // For an operation of one step, this is all that the other ranks need from this rank.
  if (is_first && !aborted_) publish(*task);
  queue_.push_back(task);
  if (!is_awaited && (!is_first || task->operation->steps() > 1)) kick(*task, lock);
}

/// Makes a background thread drive the queue. There must be one of the task's depth, because those
/// of lower depth may be in callbacks that wait for the task.
void Exchange::kick(const Task& task, const Lock& /*lock*/) {
  kicked_ = true;
  if (stop_) return;
  while (threads_.size() <= task.depth) {
    const base::SignalMask blocked;  // which the thread inherits
    threads_.emplace_back(
        [self = shared_from_this(), depth = threads_.size()] { self->run(depth); });
  }
  if (!has_turn_) work_.notify_one();
}

void Exchange::run(size_t depth) {
  Lock lock(mutex_);
  for (;;) {
    TaskPtr done;
    work_.wait(lock, [&] {
      done = next_to_settle(depth);
      return done || stop_ || (kicked_ && !has_turn_ && !queue_.empty());
    });
    if (done) {
      settle(std::move(done), lock);
    } else if (stop_) {
      return;
    } else {
      take_turn(lock, Clock::time_point::max(), depth);
    }
  }
}

Exchange::TaskPtr Exchange::next_to_settle(size_t depth) {
  const auto next = std::ranges::find(unsettled_, depth, &Task::depth);
  if (next == unsettled_.end()) return nullptr;
  TaskPtr task = std::move(*next);
  unsettled_.erase(next);
  return task;
}

/// Runs the callbacks of a task that is done, and drops it, without the mutex.
void Exchange::settle(TaskPtr task, Lock& lock) {
  WorkPtr work = std::move(task->work);
  auto future = task->future;
  lock.unlock();
  {
    const DepthGuard in_callback(task->depth);
    if (future) task->settle(future);
    work.reset();
    future.reset();
    task.reset();
  }
  lock.lock();
}

bool Exchange::is_done(const TaskPtr& task) {
  const Lock lock(mutex_);
  // A caller that polls may never call wait().
  if (!task->is_done) kick(*task, lock);
  return task->is_done;
}

void Exchange::wait(const TaskPtr& task, milliseconds timeout) {
  const bool endless = timeout == kNoTimeout;
  const auto give_up = endless ? Clock::time_point::max() : Clock::now() + timeout;
  Lock lock(mutex_);
  ++waiting_;
  bool in_time = true;
  while (!task->is_done && in_time) {
    // A publish() that blocks may exceed this timeout, so the background thread calls it.
    if (!has_turn_ && (endless || !queue_.front()->operation->blocks())) {
      in_time = take_turn(lock, give_up);
    } else if (endless) {
      done_.wait(lock);
    } else {
      in_time = done_.wait_until(lock, give_up) == std::cv_status::no_timeout;
    }
  }
  --waiting_;
  if (!task->is_done) {
    throw TimedOut(fmt::format("timed out after {}ms", timeout.count()));
  }
  if (task->error) std::rethrow_exception(task->error);
}

c10::intrusive_ptr<c10::ivalue::Future> Exchange::future_of(const TaskPtr& task) {
  Lock lock(mutex_);
  if (task->future) return task->future;
  task->future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  auto future = task->future;
  if (task->is_done) {
    lock.unlock();
    task->settle(future);
    return future;
  }
  // If the other ranks have published already, this completes the task.
  const bool is_next = !has_turn_ && queue_.front() == task && task->operation->steps() == 1;
  if (is_next) take_turn(lock, Clock::now());
  if (!task->is_done) kick(*task, lock);
  return future;
}

/// Advances the first operation of the queue without the mutex. Callbacks run after the turn,
/// because they may wait for other operations. @return false if it is not done by `give_up`.
/// @param depth of the calling background thread; none: another thread, which runs the callbacks
///   itself.
bool Exchange::take_turn(Lock& lock, Clock::time_point give_up, std::optional<size_t> depth) {
  TaskPtr task = queue_.front();
  has_turn_ = true;
  lock.unlock();
  bool is_done = true;
  bool is_in_step = false;  // with the other ranks
  std::exception_ptr error;
  try {
    is_done = advance(*task, give_up);
    is_in_step = true;
    if (is_done) task->operation->finish();
  } catch (...) {
    if (!is_in_step) abort();
    error = std::current_exception();
  }
  lock.lock();
  has_turn_ = false;
  if (is_done) {
    task->is_done = true;
    task->error = std::move(error);
    queue_.pop_front();
  }
  kicked_ = kicked_ && !queue_.empty();
  if (kicked_) work_.notify_one();
  done_.notify_all();
  if (!is_done) return false;
  // After stop() the other threads may have ended.
  if (depth && *depth != task->depth && task->future && !stop_) {
    unsettled_.push_back(std::move(task));
    work_.notify_all();
  } else {
    settle(std::move(task), lock);
  }
  return true;
}

bool Exchange::advance(Task& task, Clock::time_point give_up) {
  for (;;) {
    if (!task.is_published) {
      // After an abort, other ranks may still read the slot.
      if (aborted_) throw error_of_abort();
      publish(task);
    }
    for (; task.peer < static_cast<int>(segments_.size()); ++task.peer) {
      if (task.peer != rank_ && !await(task.peer, task, give_up)) return false;
    }
    task.operation->consume(step_of(task));
    ++step_;
    task.is_published = false;
    task.waits_since.reset();
    task.peer = 0;
    if (++task.step == task.operation->steps()) return true;
  }
}

Step Exchange::step_of(const Task& task) const {
  return {task.step, task.tag, task.deadline, segments_, layout_, rank_, step_ % kSlots};
}

void Exchange::publish(Task& task) {
  task.operation->publish(step_of(task));
  task.is_published = true;
  Header& own = segments_[static_cast<size_t>(rank_)].header();
  own.tags[step_ % kSlots].store(task.tag, std::memory_order_relaxed);
  // Sequentially consistent with await(): either this rank sees the sleeper, or the sleeper sees
  // the new number.
  own.published.store(step_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(own.published);
}

bool Exchange::has_published(int peer, uint64_t tag) const {
  const Header& header = segments_[static_cast<size_t>(peer)].header();
  const uint32_t ahead = header.published.load(std::memory_order_seq_cst) - step_;
  constexpr uint32_t kBehind = uint32_t{1} << 31;  // counters wrap around
  return ahead < kBehind && header.tags[step_ % kSlots].load(std::memory_order_relaxed) == tag;
}

/// Waits until a rank has published its part of this step. @return false at `give_up`.
/// @throws TimedOut at the operation's deadline, std::runtime_error after an abort.
bool Exchange::await(int peer, Task& task, Clock::time_point give_up) {
  if (has_published(peer, task.tag)) return true;
  const auto begin = Clock::now();
  if (!task.waits_since) task.waits_since = begin;
  // If no thread is in wait(), the program computes, perhaps on this core: do not spin for long.
  const auto end =
      std::min(give_up, *task.waits_since + (waiting_ > 0 ? spin_time_ : kShortSpinTime));
  for (auto now = begin; now < end; now = Clock::now()) {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (has_published(peer, task.tag)) return true;
      relax();
    }
    if (now - begin > kYieldAfter) ::sched_yield();
  }
  Header& header = segments_[static_cast<size_t>(peer)].header();
  for (;;) {
    const auto now = Clock::now();
    if (aborted_) throw error_of_abort();
    if (now >= task.deadline) {
      throw TimedOut(fmt::format("timed out after {}ms of waiting for rank {}",
                                 task.timeout.count(), names_[static_cast<size_t>(peer)]));
    }
    if (now >= give_up) return false;
    header.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t published = header.published.load(std::memory_order_seq_cst);
    const bool done = has_published(peer, task.tag);
    if (!done) {
      const nanoseconds left = std::min(task.deadline, give_up) - now;
      futex_wait(header.published, published, std::min(left, kMaxSleep));
    }
    header.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (done || has_published(peer, task.tag)) return true;
  }
}

}  // namespace syncbn::dist::detail::shm
