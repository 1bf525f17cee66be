#pragma once

#include <syncbn/dist/collectives.h>

#include <string>
#include <utility>
#include <vector>

namespace syncbn::dist {

/// A rank of the default group, where the functions of collectives.h take a rank of their group.
/// With dist::broadcast(tensor, dist::WorldRank(5), group) rank 5 of the world is the root, as with
/// src=5 in PyTorch; dist::broadcast(tensor, 1, group) is group_src=1.
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

inline void reduce(at::Tensor& tensor, WorldRank root, c10d::ReduceOp op = c10d::ReduceOp::SUM,
                   const GroupOrDefault& group = {}, Timeout timeout = std::nullopt) {
  reduce(tensor, get_group_rank(group, root.value), std::move(op), group, timeout);
}
inline WorkPtr reduce_async(at::Tensor& tensor, WorldRank root,
                            c10d::ReduceOp op = c10d::ReduceOp::SUM,
                            const GroupOrDefault& group = {}, Timeout timeout = std::nullopt) {
  return reduce_async(tensor, get_group_rank(group, root.value), std::move(op), group, timeout);
}

inline void broadcast(at::Tensor& tensor, WorldRank root, const GroupOrDefault& group = {},
                      Timeout timeout = std::nullopt) {
  broadcast(tensor, get_group_rank(group, root.value), group, timeout);
}
inline WorkPtr broadcast_async(at::Tensor& tensor, WorldRank root, const GroupOrDefault& group = {},
                               Timeout timeout = std::nullopt) {
  return broadcast_async(tensor, get_group_rank(group, root.value), group, timeout);
}

inline std::vector<at::Tensor> gather(const at::Tensor& tensor, WorldRank root,
                                      const GroupOrDefault& group = {},
                                      Timeout timeout = std::nullopt) {
  return gather(tensor, get_group_rank(group, root.value), group, timeout);
}
inline WorkPtr gather_async(const at::Tensor& tensor, WorldRank root,
                            const GroupOrDefault& group = {}, Timeout timeout = std::nullopt) {
  return gather_async(tensor, get_group_rank(group, root.value), group, timeout);
}

inline void scatter(at::Tensor& tensor, const std::vector<at::Tensor>& parts, WorldRank root,
                    const GroupOrDefault& group = {}, Timeout timeout = std::nullopt) {
  scatter(tensor, parts, get_group_rank(group, root.value), group, timeout);
}
inline WorkPtr scatter_async(at::Tensor& tensor, const std::vector<at::Tensor>& parts,
                             WorldRank root, const GroupOrDefault& group = {},
                             Timeout timeout = std::nullopt) {
  return scatter_async(tensor, parts, get_group_rank(group, root.value), group, timeout);
}

inline void send(const at::Tensor& tensor, WorldRank destination, const GroupOrDefault& group = {},
                 int tag = 0, Timeout timeout = std::nullopt) {
  send(tensor, get_group_rank(group, destination.value), group, tag, timeout);
}
inline WorkPtr isend(const at::Tensor& tensor, WorldRank destination,
                     const GroupOrDefault& group = {}, int tag = 0,
                     Timeout timeout = std::nullopt) {
  return isend(tensor, get_group_rank(group, destination.value), group, tag, timeout);
}

inline void recv(at::Tensor& tensor, WorldRank source, const GroupOrDefault& group = {},
                 int tag = 0, Timeout timeout = std::nullopt) {
  recv(tensor, get_group_rank(group, source.value), group, tag, timeout);
}
inline WorkPtr irecv(at::Tensor& tensor, WorldRank source, const GroupOrDefault& group = {},
                     int tag = 0, Timeout timeout = std::nullopt) {
  return irecv(tensor, get_group_rank(group, source.value), group, tag, timeout);
}

inline std::string broadcast_bytes(const std::string& bytes, WorldRank root,
                                   const GroupOrDefault& group = {},
                                   Timeout timeout = std::nullopt) {
  return broadcast_bytes(bytes, get_group_rank(group, root.value), group, timeout);
}
inline WorkPtr broadcast_bytes_async(const std::string& bytes, WorldRank root,
                                     const GroupOrDefault& group = {},
                                     Timeout timeout = std::nullopt) {
  return broadcast_bytes_async(bytes, get_group_rank(group, root.value), group, timeout);
}

inline std::vector<std::string> gather_bytes(const std::string& bytes, WorldRank root,
                                             const GroupOrDefault& group = {},
                                             Timeout timeout = std::nullopt) {
  return gather_bytes(bytes, get_group_rank(group, root.value), group, timeout);
}
inline WorkPtr gather_bytes_async(const std::string& bytes, WorldRank root,
                                  const GroupOrDefault& group = {},
                                  Timeout timeout = std::nullopt) {
  return gather_bytes_async(bytes, get_group_rank(group, root.value), group, timeout);
}

inline std::string scatter_bytes(const std::vector<std::string>& parts, WorldRank root,
                                 const GroupOrDefault& group = {}, Timeout timeout = std::nullopt) {
  return scatter_bytes(parts, get_group_rank(group, root.value), group, timeout);
}
inline WorkPtr scatter_bytes_async(const std::vector<std::string>& parts, WorldRank root,
                                   const GroupOrDefault& group = {},
                                   Timeout timeout = std::nullopt) {
  return scatter_bytes_async(parts, get_group_rank(group, root.value), group, timeout);
}

}  // namespace syncbn::dist
