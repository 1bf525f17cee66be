#include "transport/row_tree.h"
#include "transport/timeouts.h"

#include <algorithm>
#include <vector>

#include <ATen/ops/empty.h>

namespace syncbn::dist::detail {

/// @param ranks a node of the tree that this rank belongs to.
at::Tensor RowTree::merged(Ranks ranks, const at::Tensor& row) {
  if (ranks.size() == 1) return row;
  const int middle = ranks.begin + (ranks.size() + 1) / 2;
  const Ranks low{ranks.begin, middle};
  const Ranks high{middle, ranks.end};
  const bool is_low = backend_.getRank() < middle;
  const Ranks& half = is_low ? low : high;
  const Ranks& other = is_low ? high : low;
  const int place = backend_.getRank() - half.begin;

  const at::Tensor rows = at::empty({2, row.size(1)}, row.options());
  std::vector<at::Tensor> theirs{rows.narrow(0, is_low ? 1 : 0, 1)};
  // Gloo sends data only after the receiver has announced the receive. Posting all receives before
  // the first hop saves the wait for that announcement in every later hop.
  std::vector<c10::intrusive_ptr<c10d::Work>> works{
      backend_.recv(theirs, other.begin + std::min(place, other.size() - 1), tag_)};
  std::vector<at::Tensor> own{merged(half, row)};
  // The low half may have one rank more: the last rank of the high half sends to both.
  const bool is_last = place == half.size() - 1;
  const int end = is_last ? other.size() : std::min(place + 1, other.size());
  for (int peer = place; peer < end; ++peer) {
    works.push_back(backend_.send(own, other.begin + peer, tag_));
  }
  for (const auto& work : works) {
    work->wait(time_left(deadline_));
  }
  rows.narrow(0, is_low ? 0 : 1, 1).copy_(own[0]);
  return merge_(rows);
}

}  // namespace syncbn::dist::detail
