#pragma once

#include <cstddef>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace syncbn::dist {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The group of a call or an option: one that is given, or else ({}) the default one. Converts from
/// and to ProcessGroupPtr.
class GroupOrDefault {
 public:
  GroupOrDefault() = default;
  GroupOrDefault(std::nullptr_t) {}  // NOLINT: implicit
  /// A null group stands for the default one, unless new_group() has returned null on this rank,
  /// which it may be.
  /// @throws base::UserError for a null group then
  GroupOrDefault(ProcessGroupPtr group);  // NOLINT: implicit

  /// @throws base::UserError when there is no default group
  ProcessGroupPtr get() const;

  explicit operator bool() const { return static_cast<bool>(given_); }
  operator const ProcessGroupPtr&() const { return given_; }  // NOLINT: implicit. Null: the default

 private:
  ProcessGroupPtr given_;
};

}  // namespace syncbn::dist
