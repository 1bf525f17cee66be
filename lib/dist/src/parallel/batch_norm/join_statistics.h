#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/dist/process_group.h>

namespace syncbn::dist::detail {

/// The next step of a rank with input; kNoInput for the others.
enum class JoinStep : int64_t { kNoInput, kMoments, kSums, kForwardEnd, kBackwardEnd };

/// SyncBatchNorm inside a join() span: ranks without input join the exchanges of the others, with
/// rows of no samples. They do not run the layers, so the ranks with input announce each exchange
/// over the same group. While all ranks have input, no rank announces anything.
///
/// At most one exists in a process; announce_exchange() finds it. Forward and backward may use it
/// from different threads, one at a time.
class JoinStatistics {
 public:
  /// @param group of the layers.
  /// @param devices of the layers, in the same order on all ranks.
  JoinStatistics(ProcessGroupPtr group, std::vector<at::Device> devices);
  JoinStatistics(const JoinStatistics&) = delete;
  JoinStatistics& operator=(const JoinStatistics&) = delete;
  ~JoinStatistics();

  // On a rank with input.

  /// @param some_joined whether any rank has no input in this step; called at the first exchange.
  void begin_step(std::function<bool()> some_joined);
  void end_forward(bool backward_follows);
  void end_backward();

  // On a rank without input.

  /// Joins exchanges until the other ranks' forward or backward ends.
  /// @return after a forward: whether a backward follows.
  bool serve();

 private:
  friend void announce_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group);

  struct Announcement {
    JoinStep step = JoinStep::kNoInput;
    int64_t columns = 0;  ///< for kForwardEnd: whether a backward follows
    at::ScalarType dtype = at::kFloat;
    int64_t device = 0;  ///< index in devices_
    bool operator==(const Announcement&) const = default;
  };

  void announce(const Announcement& own);
  Announcement exchange(const Announcement& own);

  const ProcessGroupPtr group_;
  const std::vector<at::Device> devices_;
  std::function<bool()> ask_some_joined_;
  std::optional<bool> some_joined_;
};

/// SyncBatchNorm calls this before it exchanges a row.
void announce_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
