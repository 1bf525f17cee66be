#include "shm/offer.h"

#include <fmt/format.h>
#include <syncbn/base/log.h>

#include <cstring>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

namespace syncbn::dist::detail::shm {
namespace {

// To be raised with every change of what lies in the segments, and of when it does.
constexpr int kVersion = 1;

std::string key_of(int rank) {
  return fmt::format("syncbn/shared-memory/{}/{}", kVersion, rank);
}

/// Row after row.
at::Tensor gather(c10d::Backend& gloo, at::Tensor row) {
  at::Tensor all = at::empty({gloo.getSize() * row.numel()}, row.options());
  gloo._allgather_base(all, row)->wait();
  return all.view({gloo.getSize(), -1});
}

}  // namespace

Offer::Offer(const Layout& layout, Segment own, int rank, int size)
    : layout_(layout), own_(std::move(own)), rank_(rank), size_(size) {}

std::optional<Offer> Offer::make(c10d::Store& store, int rank, int size) {
  const Layout layout(size);
  std::optional<Segment> own = Segment::make(layout);
  if (!own) {
    spdlog::debug("rank {} has no {} bytes of memory to share", rank, layout.segment_bytes());
    return std::nullopt;
  }
  store.set(key_of(rank), "yes");
  return Offer(layout, *std::move(own), rank, size);
}

bool Offer::is_made_by_all(c10d::Store& store) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key_of(rank));
  return store.check(keys);
}

/// By rank; empty ones where this process cannot reach them.
std::vector<Segment> Offer::open_all(c10d::Backend& gloo) {
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

std::unique_ptr<SharedMemory> Offer::accept(c10d::Backend& gloo, const std::vector<int>& names) && {
  std::vector<Segment> segments = open_all(gloo);
  int64_t unreachable = -1;  // itself
  for (const Segment& segment : segments) unreachable += segment.is_open() ? 0 : 1;
  // Everybody has opened what it could when everybody has answered.
  const at::Tensor answers = gather(gloo, at::full({1}, unreachable, at::kLong));
  own_.close_to_others();
  if (answers.ne(0).any().item<bool>()) return nullptr;
  segments[static_cast<size_t>(rank_)] = std::move(own_);
  return std::make_unique<SharedMemory>(
      std::make_shared<Exchange>(layout_, std::move(segments), rank_, names));
}

}  // namespace syncbn::dist::detail::shm
