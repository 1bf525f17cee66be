#pragma once

#include <syncbn/dist/process_group_ptr.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist {

// Collectives: twins of those in torch.distributed. All block until the result is there (on CUDA:
// until the current stream will wait for it). They may be called from any one thread at a time, and
// every rank of the group calls the same ones in the same order, with tensors of the same shape and
// dtype where nothing else is said. Tensors may have any strides and any dtype; autograd knows
// nothing of it. An empty group means the default one. `root`, `source` and `destination` are ranks
// of the group (in PyTorch they are ranks of the world).
//
// They throw base::UserError for arguments that are refused, before anything is sent, and when the
// ranks called different things; base::UnavailableError when a rank ends or the timeout passes. The
// message names the rank, the collective and its number, the group, and the rank at fault where
// that is known. For CPU tensors the end of a process is noticed within a second, the loss of its
// host after 11. Not for CUDA tensors, with ranks of Python's torch.distributed in the job, or once
// rank 0 has left: then a call may wait for its timeout, and ranks that called different things do
// not learn of it.

/// The longest that a collective may take; that of the group when not given.
using Timeout = std::optional<std::chrono::milliseconds>;

/// Reduces `tensor` over all ranks, in place. On CPUs the dtype is a floating or complex one, int8,
/// uint8, int32, int64 or bool (the sum of bools is whether any is true); complex numbers can only
/// be summed.
void all_reduce(at::Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM,
                const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

/// The same, with the result on rank `root` alone. Elsewhere `tensor` stays as it is, unlike in
/// PyTorch.
void reduce(at::Tensor& tensor, int root, c10d::ReduceOp op = c10d::ReduceOp::SUM,
            const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

/// Overwrites `tensor` by that of rank `root`.
void broadcast(at::Tensor& tensor, int root, const ProcessGroupPtr& group = {},
               Timeout timeout = std::nullopt);

/// Every rank's tensor, in the order of ranks.
std::vector<at::Tensor> all_gather(const at::Tensor& tensor, const ProcessGroupPtr& group = {},
                                   Timeout timeout = std::nullopt);

/// The same on rank `root`, nothing elsewhere.
std::vector<at::Tensor> gather(const at::Tensor& tensor, int root,
                               const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

/// Overwrites `tensor` by the one that rank `root` has for this rank. `parts` has one for each rank
/// on `root`, and is empty elsewhere.
void scatter(at::Tensor& tensor, const std::vector<at::Tensor>& parts, int root,
             const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

/// Reduces `parts`, one for each rank, over all ranks, and leaves this rank's part in `output`. The
/// same dtypes as all_reduce.
void reduce_scatter(at::Tensor& output, const std::vector<at::Tensor>& parts,
                    c10d::ReduceOp op = c10d::ReduceOp::SUM, const ProcessGroupPtr& group = {},
                    Timeout timeout = std::nullopt);

/// Sends inputs[r] to rank r, and takes what rank r sent to this one into outputs[r]. The sizes may
/// differ from rank to rank, if both ends have the same in mind.
void all_to_all(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

/// The same with slices along the first dimension: input_split_sizes[r] rows go to rank r,
/// output_split_sizes[r] rows come from it; without them all slices are equal.
void all_to_all_single(at::Tensor& output, const at::Tensor& input,
                       std::vector<int64_t> output_split_sizes = {},
                       std::vector<int64_t> input_split_sizes = {},
                       const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

/// Sends `tensor` to rank `destination`, which calls recv() with one of as many elements of the
/// same dtype and the same `tag`. Other ranks take no part.
void send(const at::Tensor& tensor, int destination, const ProcessGroupPtr& group = {}, int tag = 0,
          Timeout timeout = std::nullopt);

/// Overwrites `tensor` by the one that rank `source` sends.
void recv(at::Tensor& tensor, int source, const ProcessGroupPtr& group = {}, int tag = 0,
          Timeout timeout = std::nullopt);

/// Returns when every rank has called it.
void barrier(const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

// The same for bytes, whose length may differ from rank to rank. Each takes several collectives,
// and each of these the timeout.

/// The bytes of rank `root`; those of other ranks do not matter.
std::string broadcast_bytes(const std::string& bytes, int root, const ProcessGroupPtr& group = {},
                            Timeout timeout = std::nullopt);

/// Every rank's bytes, in the order of ranks.
std::vector<std::string> all_gather_bytes(const std::string& bytes,
                                          const ProcessGroupPtr& group = {},
                                          Timeout timeout = std::nullopt);

/// The same on rank `root`, nothing elsewhere.
std::vector<std::string> gather_bytes(const std::string& bytes, int root,
                                      const ProcessGroupPtr& group = {},
                                      Timeout timeout = std::nullopt);

/// What rank `root` has for this rank. `parts` has one for each rank on `root`, and is empty
/// elsewhere.
std::string scatter_bytes(const std::vector<std::string>& parts, int root,
                          const ProcessGroupPtr& group = {}, Timeout timeout = std::nullopt);

}  // namespace syncbn::dist
