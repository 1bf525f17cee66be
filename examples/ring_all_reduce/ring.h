// The ring all-reduce of PyTorch's tutorial "Writing Distributed Applications", line by line.
#pragma once

#include <syncbn/dist/process_group.h>

#include <ATen/core/Tensor.h>

namespace ring_all_reduce {

/// Stores the sum of all ranks' `send` in `recv`. In each of W - 1 steps, a rank sends what it
/// received in the previous step to the rank on its right, and adds what arrives from its left.
inline void all_reduce(const at::Tensor& send, at::Tensor& recv) {
  namespace dist = syncbn::dist;
  const int rank = dist::rank();
  const int size = dist::world_size();
  at::Tensor send_buff = send.clone();
  at::Tensor recv_buff = send.clone();
  const at::Tensor accum = send.clone();

  const int left = (rank - 1 + size) % size;
  const int right = (rank + 1) % size;

  for (int i = 0; i < size - 1; ++i) {
    const bool is_even = i % 2 == 0;
    const at::Tensor& outgoing = is_even ? send_buff : recv_buff;
    at::Tensor& incoming = is_even ? recv_buff : send_buff;
    // isend(), because if every rank waited in send(), none would reach recv().
    const dist::WorkPtr send_req = dist::isend(outgoing, right);
    dist::recv(incoming, left);
    accum.add_(incoming);
    // Wait, because the next step overwrites `outgoing`.
    send_req->wait();
  }
  recv.copy_(accum);
}

}  // namespace ring_all_reduce
