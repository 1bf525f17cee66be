// One rank's end of a communicator: its life from joining to abort, and how it waits for peers.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "reductions.h"
#include "segment.h"

namespace fake_nccl {

/// Thrown out of a wait when the communicator is aborted.
struct Aborted {};

/// Sets what ncclGetLastError() returns; `format` is worded like a line of NCCL's log.
/// @return `result`
[[gnu::format(printf, 2, 3)]] ncclResult_t fail(ncclResult_t result, const char* format, ...);
const char* last_error();

}  // namespace fake_nccl

/// What ncclComm_t points to.
struct ncclComm {
 public:
  ncclComm(std::string name, int rank, int ranks, int device, bool is_blocking);
  ~ncclComm();

  /// The communicator of a handle; null once it is destroyed.
  static std::shared_ptr<ncclComm> find(ncclComm_t handle);
  /// Gives the handle to the user, who ends it by destroy() or abort().
  static ncclComm_t publish(const std::shared_ptr<ncclComm>& made);

  /// Runs `job`: at once if the communicator is blocking, else on a thread, during which state() is
  /// ncclInProgress.
  ncclResult_t run(std::function<ncclResult_t()> job);

  /// What ncclCommGetAsyncError() reports.
  ncclResult_t state() const;
  /// The first operation connects: a non-blocking communicator is then busy for a moment.
  ncclResult_t connect();

  /// Since NCCL 2.22, the caller of the first collective of a kind connects the ranks, and so waits
  /// for them.
  ncclResult_t meet_in_first_call(int kind);

  /// Waits for all ranks. @throws fake_nccl::Aborted
  ncclResult_t join();
  /// The `own` values of all ranks, in the order of ranks. For calls in which hosts wait.
  template <class Note>
  std::vector<Note> exchange(const Note& own);
  /// Waits until this rank's operations have run and all peers have left.
  ncclResult_t finalize();
  /// Calls finalize() unless that has happened, and frees the handle.
  ncclResult_t destroy();
  /// Ends running and later operations, and frees the handle.
  ncclResult_t abort();

  /// Runs one operation in the order of a stream, while other operations of this communicator wait.
  /// Returns early if the communicator is aborted.
  void operate(const std::function<void()>& operation);

  /// One step of an operation on a stream, see fake_nccl::Lane.
  /// @param publish writes to this rank's slot
  /// @param consume reads the slots
  template <class Publish, class Consume>
  void step(const fake_nccl::Header& header, Publish publish, Consume consume) {
    step_in(shared().stream_lanes, header, publish, consume);
  }
  char* slot(int of) const { return shared().slots[static_cast<size_t>(of)].data(); }
  fake_nccl::Mailbox& mailbox(int from, int to) const {
    return shared().mail[static_cast<size_t>(from)][static_cast<size_t>(to)];
  }

  /// Polls until `is_ready`. @throws fake_nccl::Aborted
  void wait(const std::function<bool()>& is_ready);

  /// An operation keeps the result until it has run; finalize() waits for that.
  std::shared_ptr<void> hold() const { return operations_; }

  const std::string name;
  const int rank;
  const int ranks;
  const int device;
  const bool is_blocking;
  int splits = 0;  ///< so far

 private:
  template <class Lanes, class Publish, class Consume>
  void step_in(Lanes& lanes, const fake_nccl::Header& header, Publish publish, Consume consume);
  bool all(const std::function<bool(int peer)>& condition) const;
  void look_for_dead_peers();
  ncclResult_t check_devices() const;
  void leave();
  fake_nccl::SharedState& shared() const { return segment_->state(); }

  std::unique_ptr<fake_nccl::Segment> segment_;
  const std::shared_ptr<void> operations_ = std::make_shared<char>();
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> is_finalized_{false};
  std::atomic<ncclResult_t> state_{ncclSuccess};
  std::atomic<bool> has_connected_{false};
  std::atomic<unsigned> have_met_{0};  ///< a bit for each kind of collective
  std::atomic<std::chrono::steady_clock::time_point> connected_at_{};
  std::thread job_;
  std::mutex operation_mutex_;
};

template <class Lanes, class Publish, class Consume>
void ncclComm::step_in(Lanes& lanes, const fake_nccl::Header& header, Publish publish,
                       Consume consume) {
  fake_nccl::Lane& own = lanes[static_cast<size_t>(rank)];
  const uint64_t number = own.published + 1;
  const auto lane = [&lanes](int of) -> fake_nccl::Lane& { return lanes[static_cast<size_t>(of)]; };
  wait([&] { return all([&](int peer) { return lane(peer).consumed + 1 >= number; }); });
  own.header = header;
  publish();
  own.published = number;
  wait([&] {
    return all(
        [&](int peer) { return lane(peer).published >= number && lane(peer).header == header; });
  });
  consume();
  own.consumed = number;
}

template <class Note>
std::vector<Note> ncclComm::exchange(const Note& own) {
  static_assert(sizeof(Note) <= sizeof(fake_nccl::SharedState::notes[0]));
  std::vector<Note> notes(static_cast<size_t>(ranks));
  step_in(
      shared().host_lanes, {.bytes = sizeof own},
      [&] { std::memcpy(shared().notes[static_cast<size_t>(rank)].data(), &own, sizeof own); },
      [&] {
        for (size_t peer = 0; peer < notes.size(); ++peer) {
          std::memcpy(&notes[peer], shared().notes[peer].data(), sizeof own);
        }
      });
  return notes;
}
