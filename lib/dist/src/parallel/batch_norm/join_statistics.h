#pragma once

#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include <syncbn/dist/process_group.h>

namespace syncbn::dist::detail {

/// SyncBatchNorm inside a join() span: lets ranks without input take part in the exchanges of those
/// that still have some, with rows of no samples. Since they do not run the layers, they are told
/// ahead of each exchange what comes, by an announcement over the same group. While all ranks have
/// input, nothing is announced.
///
/// At most one exists in a process; announce_exchange() finds it. Forward and backward may use it
/// from different threads, one at a time.
class JoinStatistics {
 public:
  /// @param group of the layers.
  JoinStatistics(ProcessGroupPtr group, at::Device device);
  JoinStatistics(const JoinStatistics&) = delete;
  JoinStatistics& operator=(const JoinStatistics&) = delete;
  ~JoinStatistics();

  // On a rank with input.

  /// @param some_joined whether any rank has no input in this step; asked when first needed.
  void begin_step(std::function<bool()> some_joined);
  void end_forward(bool backward_follows);
  void end_backward();

  // On a rank without.

  /// Takes part until the others' forward ends; returns whether a backward follows.
  bool serve_forward();
  /// The same until their backward ends.
  void serve_backward();

 private:
  friend void announce_gather(const at::Tensor& row, const ProcessGroupPtr& group);
  friend void announce_sum(const at::Tensor& row, const ProcessGroupPtr& group);

  enum class Step : int64_t { kNoInput, kGather, kSum, kForwardEnd, kBackwardEnd };
  struct Announcement {
    Step step = Step::kNoInput;
    int64_t columns = 0;  ///< of kForwardEnd: whether a backward follows
    at::ScalarType dtype = at::kFloat;
    bool operator==(const Announcement&) const = default;
  };

  void announce(const Announcement& own);
  Announcement exchange(const Announcement& own);
  bool some_joined();
  /// Serves until an end, which it returns.
  Announcement serve();

  const ProcessGroupPtr group_;
  const at::Device device_;
  std::function<bool()> ask_some_joined_;
  std::optional<bool> some_joined_;
};

/// SyncBatchNorm calls these ahead of gather_rows(row, group) and sum_rows(row, group).
void announce_gather(const at::Tensor& row, const ProcessGroupPtr& group);
void announce_sum(const at::Tensor& row, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
