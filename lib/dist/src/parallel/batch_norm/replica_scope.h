#pragma once

#include <unordered_map>

#include <ATen/core/Tensor.h>

#include "batch_norm/replica_team.h"
#include "batch_norm/statistics_scopes.h"

namespace syncbn::dist::detail {

/// Maps the parameters and buffers of a module's copy to those of the module.
using Originals = std::unordered_map<const at::TensorImpl*, const at::TensorImpl*>;

/// While one lives, this thread runs a replica of a module: layers that share statistics also share
/// them with the team's other replicas.
class ReplicaScope {
 public:
  /// @param originals empty for the module itself
  /// @param recorder for the layers of this replica; may be null
  ReplicaScope(ReplicaTeam& team, int replica, const Originals& originals,
               BatchStatisticsRecorder* recorder)
      : team_(team), replica_(replica), originals_(originals) {
    current_ = this;
    BatchStatisticsRecorder::current = recorder;
  }
  ~ReplicaScope() {
    current_ = nullptr;
    BatchStatisticsRecorder::current = nullptr;
  }
  ReplicaScope(const ReplicaScope&) = delete;
  ReplicaScope& operator=(const ReplicaScope&) = delete;

  /// Null on other threads, and for a replica that is alone.
  static const ReplicaScope* current() {
    return current_ != nullptr && current_->team_.size() > 1 ? current_ : nullptr;
  }

  /// The module's tensor that a replica's tensor is a copy of; other tensors map to themselves.
  static const at::TensorImpl* original_of(const at::TensorImpl* tensor) {
    if (current_ == nullptr) return tensor;
    const auto found = current_->originals_.find(tensor);
    return found == current_->originals_.end() ? tensor : found->second;
  }

  ReplicaTeam& team() const { return team_; }
  int replica() const { return replica_; }

 private:
  inline static thread_local const ReplicaScope* current_ = nullptr;
  ReplicaTeam& team_;
  const int replica_;
  const Originals& originals_;
};

}  // namespace syncbn::dist::detail
