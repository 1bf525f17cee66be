#pragma once

#include <cstddef>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace syncbn::dist {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The group of a call or option; {} is the default group. Converts from and to ProcessGroupPtr,
/// which is null for the default group.
class GroupOrDefault {
 public:
  GroupOrDefault() = default;
  GroupOrDefault(std::nullptr_t) {}  // NOLINT: implicit
  /// A null group is the default group. Once new_group() has returned null on this rank, null is
  /// refused, because it may be that result.
  /// @throws base::UserError for such a null group
  GroupOrDefault(ProcessGroupPtr group);  // NOLINT: implicit

  /// @throws base::UserError when there is no default group
  ProcessGroupPtr get() const;

  explicit operator bool() const { return static_cast<bool>(given_); }
  operator const ProcessGroupPtr&() const { return given_; }  // NOLINT: implicit. Null: the default

 private:
  ProcessGroupPtr given_;
};

}  // namespace syncbn::dist
