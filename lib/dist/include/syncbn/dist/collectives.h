#pragma once

#include <syncbn/dist/process_group_ptr.h>
#include <syncbn/dist/work.h>
#include <syncbn/dist/world_rank.h>

#include <cstdint>
#include <string>
#include <vector>

namespace syncbn::dist {

// Collectives: twins of those in torch.distributed. They block until the result is there (on CUDA:
// until it is queued on the current stream). Call them from one thread at a time. Every rank of the
// group calls the same collectives in the same order, with tensors of the same shape and dtype
// unless documented otherwise. Tensors may have any strides and dtype; autograd does not record
// collectives. {} is the default group. `root`, `source` and `destination` are ranks of the group,
// or with WorldRank(5) ranks of the world, as in PyTorch.
//
// They throw base::UserError for invalid arguments, before anything is sent, and when ranks call
// different collectives; PeerError when a rank exits or the timeout passes. The message names the
// rank, the collective and its number, the group, and the rank at fault if it is known. For CPU
// tensors the end of a process is detected within 1 s, the loss of its host after 11 s. With CUDA
// tensors, with ranks of Python's torch.distributed in the job, or after rank 0 has left, a call
// may wait for its timeout instead, and differing calls are not detected.

/// Reduces `tensor` over all ranks, in place. Dtypes on CPUs: floating-point, complex (SUM only),
/// int8, uint8, int32, int64, and bool, for which SUM is a logical or.
void all_reduce(at::Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM,
                const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Like all_reduce, with the result on rank `root` only; PyTorch also changes `tensor` elsewhere.
void reduce(at::Tensor& tensor, GroupRank root, c10d::ReduceOp op = c10d::ReduceOp::SUM,
            const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Overwrites `tensor` with that of rank `root`.
void broadcast(at::Tensor& tensor, GroupRank root, const GroupOrDefault& group = {},
               Timeout timeout = std::nullopt);

/// Returns every rank's tensor, in the order of ranks.
std::vector<at::Tensor> all_gather(const at::Tensor& tensor, const GroupOrDefault& group = {},
                                   Timeout timeout = std::nullopt);

/// Like all_gather on rank `root`; returns nothing elsewhere.
std::vector<at::Tensor> gather(const at::Tensor& tensor, GroupRank root,
                               const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Overwrites `tensor` with this rank's part. `parts`: one per rank on rank `root`, else none.
void scatter(at::Tensor& tensor, const std::vector<at::Tensor>& parts, GroupRank root,
             const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// all_gather into one tensor: `output` holds the ranks' tensors one after the other. It has
/// world_size() times the elements of `input`, in any shape.
void all_gather_into_tensor(at::Tensor& output, const at::Tensor& input,
                            const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Reduces `parts`, one per rank, and stores this rank's part in `output`. Dtypes as in all_reduce.
void reduce_scatter(at::Tensor& output, const std::vector<at::Tensor>& parts,
                    c10d::ReduceOp op = c10d::ReduceOp::SUM, const GroupOrDefault& group = {},
                    Timeout timeout = std::nullopt);

/// reduce_scatter of one tensor: `input` holds the parts one after the other. It has world_size()
/// times the elements of `output`, in any shape.
void reduce_scatter_tensor(at::Tensor& output, const at::Tensor& input,
                           c10d::ReduceOp op = c10d::ReduceOp::SUM,
                           const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Sends inputs[r] to rank r, and receives from rank r into outputs[r]. Sizes may differ between
/// ranks; sender and receiver must use the same.
void all_to_all(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// all_to_all with slices along the first dimension: sends input_split_sizes[r] rows to rank r and
/// receives output_split_sizes[r] rows from it. Without sizes all slices are equal.
void all_to_all_single(at::Tensor& output, const at::Tensor& input,
                       std::vector<int64_t> output_split_sizes = {},
                       std::vector<int64_t> input_split_sizes = {},
                       const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Sends `tensor` to rank `destination`, which calls recv() with the same number of elements, dtype
/// and `tag`. Other ranks do not take part.
void send(const at::Tensor& tensor, GroupRank destination, const GroupOrDefault& group = {},
          int tag = 0, Timeout timeout = std::nullopt);

/// Overwrites `tensor` with the one that rank `source` sends.
void recv(at::Tensor& tensor, GroupRank source, const GroupOrDefault& group = {}, int tag = 0,
          Timeout timeout = std::nullopt);

/// Returns when every rank has called it.
void barrier(const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

// Collectives for bytes, of any length on each rank. Each consists of several collectives, and the
// timeout applies to each of these.

/// Returns the bytes of rank `root`; those of other ranks are ignored.
std::string broadcast_bytes(const std::string& bytes, GroupRank root,
                            const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// Returns every rank's bytes, in the order of ranks.
std::vector<std::string> all_gather_bytes(const std::string& bytes,
                                          const GroupOrDefault& group = {},
                                          Timeout timeout = std::nullopt);

/// Like all_gather_bytes on rank `root`; returns nothing elsewhere.
std::vector<std::string> gather_bytes(const std::string& bytes, GroupRank root,
                                      const GroupOrDefault& group = {},
                                      Timeout timeout = std::nullopt);

/// Returns this rank's part. `parts` has one part per rank on rank `root`, and is empty elsewhere.
std::string scatter_bytes(const std::vector<std::string>& parts, GroupRank root,
                          const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

// Asynchronous forms: they start the operation and return a Work; after its wait() the result is
// there, as after the blocking function (docs/process_groups.md). Ranks may mix both forms. Every
// rank still starts a group's collectives in the same order; sends and recvs are not part of that
// order. These functions throw base::UserError for invalid arguments; other errors come from
// Work::wait(). `timeout` counts from the start.

WorkPtr all_reduce_async(at::Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM,
                         const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr reduce_async(at::Tensor& tensor, GroupRank root, c10d::ReduceOp op = c10d::ReduceOp::SUM,
                     const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr broadcast_async(at::Tensor& tensor, GroupRank root, const GroupOrDefault& group = {},
                        Timeout timeout = std::nullopt);
/// Work::tensors() returns the tensors.
WorkPtr all_gather_async(const at::Tensor& tensor, const GroupOrDefault& group = {},
                         Timeout timeout = std::nullopt);
WorkPtr all_gather_into_tensor_async(at::Tensor& output, const at::Tensor& input,
                                     const GroupOrDefault& group = {},
                                     Timeout timeout = std::nullopt);
/// Work::tensors() returns the tensors.
WorkPtr gather_async(const at::Tensor& tensor, GroupRank root, const GroupOrDefault& group = {},
                     Timeout timeout = std::nullopt);
WorkPtr scatter_async(at::Tensor& tensor, const std::vector<at::Tensor>& parts, GroupRank root,
                      const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr reduce_scatter_async(at::Tensor& output, const std::vector<at::Tensor>& parts,
                             c10d::ReduceOp op = c10d::ReduceOp::SUM,
                             const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr reduce_scatter_tensor_async(at::Tensor& output, const at::Tensor& input,
                                    c10d::ReduceOp op = c10d::ReduceOp::SUM,
                                    const GroupOrDefault& group = {},
                                    Timeout timeout = std::nullopt);
WorkPtr all_to_all_async(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                         const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr all_to_all_single_async(at::Tensor& output, const at::Tensor& input,
                                std::vector<int64_t> output_split_sizes = {},
                                std::vector<int64_t> input_split_sizes = {},
                                const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr barrier_async(const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

/// send() that does not wait. A send ends when the other rank has called recv() or irecv(). Without
/// a receiver it fails at its timeout, in wait(), and the error names the peer.
WorkPtr isend(const at::Tensor& tensor, GroupRank destination, const GroupOrDefault& group = {},
              int tag = 0, Timeout timeout = std::nullopt);
WorkPtr irecv(at::Tensor& tensor, GroupRank source, const GroupOrDefault& group = {}, int tag = 0,
              Timeout timeout = std::nullopt);

/// An operation of batch_isend_irecv().
struct P2POp {
  enum class Type { kSend, kRecv };

  Type type;
  at::Tensor tensor;
  int peer;  ///< a rank of the group
  int tag = 0;

  static P2POp send(const at::Tensor& tensor, int destination, int tag = 0) {
    return {Type::kSend, tensor, destination, tag};
  }
  static P2POp recv(const at::Tensor& tensor, int source, int tag = 0) {
    return {Type::kRecv, tensor, source, tag};
  }
};

/// Starts all of them, or none if an argument is invalid. Returns one Work each. With NCCL they are
/// not one launch as in PyTorch: order them so that each send meets its recv.
std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& ops,
                                       const GroupOrDefault& group = {},
                                       Timeout timeout = std::nullopt);

// Work::bytes() returns the bytes.

WorkPtr broadcast_bytes_async(const std::string& bytes, GroupRank root,
                              const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr all_gather_bytes_async(const std::string& bytes, const GroupOrDefault& group = {},
                               Timeout timeout = std::nullopt);
WorkPtr gather_bytes_async(const std::string& bytes, GroupRank root,
                           const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);
WorkPtr scatter_bytes_async(const std::vector<std::string>& parts, GroupRank root,
                            const GroupOrDefault& group = {}, Timeout timeout = std::nullopt);

}  // namespace syncbn::dist
