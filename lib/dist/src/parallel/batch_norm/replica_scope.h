#pragma once

#include <optional>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "batch_norm/replica_team.h"
#include "batch_norm/statistics_scopes.h"

namespace syncbn::dist::detail {

/// The parameters and buffers of a replica, and those of the module that they are copies of.
struct ReplicaTensors {
  std::unordered_map<const at::TensorImpl*, const at::TensorImpl*> originals;  ///< by copy
  /// By original. Only for a replica that runs the module itself.
  std::unordered_map<const at::TensorImpl*, at::Tensor> copies;
  bool is_of_module = false;  ///< all replicas run the module itself
};

/// On a thread that includes this key, operators get the replica's tensors in place of the module's
/// (module_replicas.cpp). libtorch leaves the key to extensions.
inline constexpr c10::DispatchKey kReplicaKey = c10::DispatchKey::DeferredInit;

/// While one lives, this thread runs a replica of a module: layers that share statistics also share
/// them with the team's other replicas.
class ReplicaScope {
 public:
  /// @param tensors without any for replica 0
  /// @param recorder for the layers of this replica; may be null
  ReplicaScope(ReplicaTeam& team, int replica, const ReplicaTensors& tensors,
               BatchStatisticsRecorder* recorder)
      : team_(team), replica_(replica), tensors_(tensors) {
    if (!tensors.copies.empty()) key_.emplace(kReplicaKey);
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

  /// Whether other threads run the same layers as this one.
  static bool shares_layers() { return current() != nullptr && current_->tensors_.is_of_module; }

  /// The module's tensor that a replica's tensor is a copy of; other tensors map to themselves.
  static const at::TensorImpl* original_of(const at::TensorImpl* tensor) {
    if (current_ == nullptr) return tensor;
    const auto found = current_->tensors_.originals.find(tensor);
    return found == current_->tensors_.originals.end() ? tensor : found->second;
  }

  /// The replica's tensor in place of one of the module's; other tensors stay.
  static at::Tensor own(const at::Tensor& tensor) {
    if (current_ == nullptr) return tensor;
    const auto found = current_->tensors_.copies.find(tensor.unsafeGetTensorImpl());
    return found == current_->tensors_.copies.end() ? tensor : found->second;
  }

  ReplicaTeam& team() const { return team_; }
  int replica() const { return replica_; }

 private:
  inline static thread_local const ReplicaScope* current_ = nullptr;
  ReplicaTeam& team_;
  const int replica_;
  const ReplicaTensors& tensors_;
  std::optional<c10::impl::IncludeDispatchKeyGuard> key_;
};

}  // namespace syncbn::dist::detail
