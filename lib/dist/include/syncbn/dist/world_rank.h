#pragma once

#include <syncbn/dist/process_group_ptr.h>

namespace syncbn::dist {

/// A rank of the default group, for functions of collectives.h, which otherwise take a rank of
/// their group. With dist::broadcast(tensor, dist::WorldRank(5), group) rank 5 of the world is the
/// root, as with src=5 in PyTorch; dist::broadcast(tensor, 1, group) is group_src=1.
struct WorldRank {
  explicit constexpr WorldRank(int value) : value(value) {}

  int value;
};

/// The rank in `group` (empty: the default group) of a rank of the world.
/// @throws base::UserError if the rank is not in the group.
int get_group_rank(const GroupOrDefault& group, int global_rank);

/// The rank in the world of a rank of `group` (empty: the default group).
/// @throws base::UserError if the group has no such rank.
int get_global_rank(const GroupOrDefault& group, int group_rank);

/// A root or peer of a call: its rank in the group, or a WorldRank.
class GroupRank {
 public:
  constexpr GroupRank(int rank) : rank_(rank) {}  // NOLINT: implicit
  constexpr GroupRank(WorldRank rank)
      : rank_(rank.value), is_of_world_(true) {}  // NOLINT: implicit

  /// The rank in the group of the call. @throws base::UserError for a WorldRank that is not in it.
  int in(const GroupOrDefault& group) const {
    return is_of_world_ ? get_group_rank(group, rank_) : rank_;
  }

 private:
  int rank_;
  bool is_of_world_ = false;
};

}  // namespace syncbn::dist
