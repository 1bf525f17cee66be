#include "transport/handshake.h"

#include <fmt/format.h>
#include <syncbn/base/log.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>

#include "transport/hierarchical.h"

namespace syncbn::dist::detail::shm {
namespace {

// Increase it with every change to the contents of segments, or to the order in which ranks access
// them.
constexpr int kVersion = 4;

std::string key_of(int rank) {
  return fmt::format("syncbn/shared-memory/{}/{}", kVersion, rank);
}

/// Takes [n] from each rank, returns [W, n].
at::Tensor gather(c10d::Backend& gloo, at::Tensor row) {
  at::Tensor all = at::empty({gloo.getSize() * row.numel()}, row.options());
  gloo._allgather_base(all, row)->wait();
  return all.view({gloo.getSize(), -1});
}

/// The ranks by host. Empty if no two ranks share one, or if reachability is not transitive.
/// @param shared a row for each rank, with 1 for the ranks that it reaches and that reach it.
std::vector<std::vector<int>> hosts_of(const at::Tensor& shared) {
  const auto size = static_cast<size_t>(shared.size(0));
  const auto* values = static_cast<const char*>(shared.const_data_ptr());
  const auto row = [&](size_t rank) { return std::string_view(values + rank * size, size); };
  std::vector<std::vector<int>> hosts;
  for (size_t rank = 0; rank < size; ++rank) {
    std::vector<int> members;
    for (size_t other = 0; other < size; ++other) {
      if (row(rank)[other] == 0) continue;
      if (row(rank) != row(other)) return {};
      members.push_back(static_cast<int>(other));
    }
    if (members.front() == static_cast<int>(rank)) hosts.push_back(std::move(members));
  }
  if (hosts.size() == size) hosts.clear();
  return hosts;
}

}  // namespace

Handshake::Handshake(const Layout& layout, Segment own, int rank, int size)
    : layout_(layout), own_(std::move(own)), rank_(rank), size_(size) {}

std::optional<Handshake> Handshake::start(c10d::Store& store, int rank, int size) {
  const Layout layout(size);
  std::optional<Segment> own = Segment::make(layout);
  if (!own) {
    spdlog::debug("rank {} has no {} bytes of memory to share", rank, layout.segment_bytes());
    return std::nullopt;
  }
  store.set(key_of(rank), "yes");
  return Handshake(layout, *std::move(own), rank, size);
}

bool Handshake::is_started_by_all(c10d::Store& store) const {
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key_of(rank));
  return store.check(keys);
}

/// The segments by rank; empty ones for ranks that this process cannot reach.
std::vector<Segment> Handshake::open_all(c10d::Backend& gloo) {
  const Address address = own_.address();
  at::Tensor row = at::empty({static_cast<int64_t>(sizeof(Address))}, at::kByte);
  std::memcpy(row.mutable_data_ptr(), &address, sizeof(Address));
  const at::Tensor rows = gather(gloo, row);
  std::vector<Segment> segments(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    Address theirs;
    std::memcpy(&theirs, rows[rank].const_data_ptr(), sizeof(Address));
    if (auto segment = Segment::open(theirs, layout_)) {
      segments[static_cast<size_t>(rank)] = *std::move(segment);
    }
  }
  return segments;
}

std::shared_ptr<Transport> Handshake::finish(const std::shared_ptr<Gloo>& gloo,
                                             const std::vector<int>& names,
                                             const ConnectHosts& connect) && {
  std::vector<Segment> segments = open_all(*gloo->backend());
  segments[static_cast<size_t>(rank_)] = std::move(own_);
  at::Tensor reached = at::empty({size_}, at::kByte);
  for (int rank = 0; rank < size_; ++rank) {
    const bool is_open = segments[static_cast<size_t>(rank)].is_open();
    reached.mutable_data_ptr<uint8_t>()[rank] = is_open ? 1 : 0;
  }
  // When this returns, all ranks have opened every segment that they can reach.
  const at::Tensor reach = gather(*gloo->backend(), reached);
  segments[static_cast<size_t>(rank_)].close_to_others();
  auto hosts = std::make_shared<Hosts>();
  hosts->ranks = hosts_of(reach.bitwise_and(reach.t()).contiguous());
  if (hosts->ranks.empty()) return gloo;
  hosts->own = hosts->host_of(rank_);

  const std::vector<int>& ranks = hosts->ranks[hosts->own];
  std::vector<Segment> here;
  std::vector<int> names_here;
  for (const int rank : ranks) {
    here.push_back(std::move(segments[static_cast<size_t>(rank)]));
    names_here.push_back(names[static_cast<size_t>(rank)]);
  }
  const auto own = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  auto exchange = std::make_shared<Exchange>(layout_, std::move(here), own, std::move(names_here));
  const auto count = static_cast<int>(hosts->ranks.size());
  if (count == 1) return std::make_shared<SharedMemory>(std::move(exchange), gloo);
  if (own == 0) hosts->leaders = connect(static_cast<int>(hosts->own), count);
  return std::make_shared<Hierarchical>(std::move(exchange), gloo, std::move(hosts));
}

}  // namespace syncbn::dist::detail::shm
