#include "collectives/gather_rows.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/plain_message.h>

#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "groups/world.h"
#include "monitor/flight_recorder.h"
#include "transport/no_sigpipe.h"
#include "transport/timeouts.h"

namespace syncbn::dist::detail {

c10::intrusive_ptr<c10d::Work> start_gather_rows(const at::Tensor& row, const at::Tensor& all,
                                                 const ProcessGroupPtr& group, Timeout timeout,
                                                 bool is_awaited) {
  const NamedAs named("all_gather", row.sizes());
  Backend* const backend = backend_of(group);
  if (backend != nullptr && backend->gathers_in_one_hop(row)) {
    const at::Tensor values = row.contiguous();
    const size_t begin = static_cast<size_t>(group->getRank()) * row.nbytes();
    // The row may already be in its place.
    std::memmove(static_cast<char*>(all.mutable_data_ptr()) + begin, values.const_data_ptr(),
                 row.nbytes());
    const auto limit = timeout.value_or(c10d::kUnsetTimeout);
    if (!is_awaited) return backend->start_gather_in_one_hop(all, limit);
    backend->gather_in_one_hop(all, limit);
    return {};
  }
  if (row.numel() != 0) {
    at::Tensor rows = all;
    at::Tensor own = row;
    return group->_allgather_base(rows, own, with_timeout<c10d::AllgatherOptions>(timeout));
  }
  if (!all_ranks_are_ours(group)) return {};
  // Gloo refuses empty tensors. Send a dummy, so that a rank whose row is not empty sees the
  // mismatch.
  return start_gather_rows(at::zeros({1, 1}, row.options()),
                           at::empty({group->getSize(), 1}, row.options()), group, timeout,
                           is_awaited);
}

at::Tensor gather_rows(const at::Tensor& row, const ProcessGroupPtr& group, Timeout timeout) {
  at::Tensor all = at::empty({group->getSize(), row.size(1)}, row.options());
  const auto work = start_gather_rows(row, all, group, timeout, /*is_awaited=*/true);
  if (work) work->wait();
  return all;
}

bool merges_in_tree(const at::Tensor& row, const ProcessGroupPtr& group) {
  const Backend* const backend = backend_of(group);
  return backend != nullptr && row.is_cpu() && !backend->gathers_in_one_hop(row);
}

at::Tensor merge_in_tree(const at::Tensor& row, const ProcessGroupPtr& group, MergeRows merge,
                         Timeout timeout) {
  return backend_of(group)->merge_in_tree(row, merge, timeout.value_or(c10d::kUnsetTimeout));
}

at::Tensor sum_rows(const at::Tensor& row, const ProcessGroupPtr& group, Timeout timeout) {
  std::vector<at::Tensor> total{row};
  group->allreduce(total, with_timeout<c10d::AllreduceOptions>(timeout))->wait();
  return total[0];
}

at::Tensor gather_one_by_one(const at::Tensor& row, const ProcessGroupPtr& group, Timeout timeout,
                             const std::string& what) {
  constexpr int kTag = 0x5b17;  // users are unlikely to choose the same one
  const auto naming = [&](int rank, const auto& step) {
    try {
      step();
    } catch (const base::UserError&) {
      throw;  // this rank's own error
    } catch (const std::exception& error) {
      throw base::UnavailableError(fmt::format(
          "rank {} did not arrive at {}: {}", world_rank(group, rank), what, plain_message(error)));
    }
  };
  at::Tensor all = row.expand({group->getSize(), row.size(1)}).clone();
  std::vector<at::Tensor> own{row};
  std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> works;
  const NoSigpipe sends_write_in_this_thread;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    if (rank == group->getRank()) continue;
    naming(rank, [&] {
      std::vector<at::Tensor> theirs{all.narrow(0, rank, 1)};
      works.emplace_back(rank, group->send(own, rank, kTag));
      works.emplace_back(rank, group->recv(theirs, rank, kTag));
    });
  }
  const auto deadline =
      std::chrono::steady_clock::now() + timeout.value_or(std::chrono::milliseconds(0));
  for (const auto& item : works) {
    naming(item.first, [&] { item.second->wait(timeout ? time_left(deadline) : kNoTimeout); });
  }
  return all;
}

}  // namespace syncbn::dist::detail
