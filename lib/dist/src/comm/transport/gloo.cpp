#include "transport/gloo.h"

#include <c10/util/hash.h>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "transport/no_sigpipe.h"
#include "transport/row_tree.h"
#include "transport/timeouts.h"

namespace syncbn::dist::detail {
namespace {

// Gloo's all-gather passes rows around a ring: W - 1 hops, each of which wakes a thread. In its
// all-to-all each rank sends its row W - 1 times in one hop: faster for small rows and groups.
constexpr int kMaxOneHopRanks = 16;
constexpr size_t kMaxOneHopBytes = size_t{64} * 1024;

// Tags of send and recv from this value on are reserved for abort().
constexpr int kReservedTags = 0x7fff0000;

}  // namespace

class TaggedGloo : public c10d::ProcessGroupGloo {
 public:
  using Tensors = std::vector<at::Tensor>;

  TaggedGloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
             const c10::intrusive_ptr<Options>& options, bool all_ours)
      : ProcessGroupGloo(store, rank, world_size, options), all_ours_(all_ours) {}

  // The sequence number occupies the low bits, by which Gloo alternates between its meshes.
  void set_next_tag(uint64_t tag) {
    collectiveCounter_ = static_cast<uint32_t>((tag & 0xffff) << 16 | (tag >> 16 & 0xffff));
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int destination, int tag) override {
    const NoSigpipe sends_write_in_this_thread;
    return ProcessGroupGloo::send(tensors, destination, wire_tag(tag, tensors));
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int source, int tag) override {
    const NoSigpipe sends_write_in_this_thread;
    return ProcessGroupGloo::recv(tensors, source, wire_tag(tag, tensors));
  }

  // Gloo closes all connections of a mesh when one wait exceeds its timeout. So this waits in each
  // mesh (one per device, chosen by tag) for a message that no rank sends. It waits for one from
  // each peer, because a recv over a connection that is already closed fails without that effect.
  void abort() override {
    const int meshes = static_cast<int>(contexts_.size());
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer == getRank()) continue;
      for (int tag = kReservedTags; tag < kReservedTags + meshes; ++tag) {
        Tensors nothing{at::empty({1}, at::kByte)};
        try {
          ProcessGroupGloo::recv(nothing, peer, tag)->wait(std::chrono::milliseconds(1));
        } catch (const std::exception&) {  // as intended
        }
      }
    }
  }

 private:
  /// Depends on dtype and length, so that only equal transfers match.
  int wire_tag(int tag, const Tensors& tensors) const {
    if (!all_ours_ || tensors.empty() || !tensors[0].is_cpu()) return tag;
    const size_t hash =
        c10::get_hash(tag, static_cast<int>(tensors[0].scalar_type()), tensors[0].numel());
    return static_cast<int>((hash ^ (hash >> 32)) % static_cast<size_t>(kReservedTags));
  }

  const bool all_ours_;
};

Gloo::Gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
           const std::vector<std::string>& addresses, std::chrono::milliseconds timeout,
           bool all_ours)
    : all_ours_(all_ours) {
  using Library = c10d::ProcessGroupGloo;
  const NoSigpipe threads_inherit_it;
  auto options = Library::Options::create(timeout);
  options->devices.clear();
  for (const std::string& address : addresses) {
    options->devices.push_back(Library::createDeviceForHostname(address, /*lazyInit=*/false));
  }
  // One device, because Python ranks connect only one mesh.
  if (addresses.empty()) {
    options->devices.push_back(Library::createDefaultDevice(/*lazyInit=*/false));
  }
  gloo_ = c10::make_intrusive<TaggedGloo>(store, rank, world_size, options, all_ours);
}

Gloo::~Gloo() = default;

c10::intrusive_ptr<c10d::Backend> Gloo::backend() const {
  return gloo_;
}

c10d::Backend& Gloo::with_tag(uint64_t tag) {
  gloo_->set_next_tag(tag);
  return *gloo_;
}

c10d::Backend& Gloo::prepare(const Call& call) {
  return all_ours_ && call.is_collective() ? with_tag(tag_of(call)) : *gloo_;
}

void Gloo::set_timeout(std::chrono::milliseconds timeout) {
  gloo_->setTimeout(timeout);
}

void Gloo::abort() {
  const std::lock_guard lock(mutex_);
  if (gloo_) gloo_->abort();
}

void Gloo::shutdown() {
  gloo_->shutdown();
}

// Pending calls keep this object alive, and a thread of Gloo, which cannot destroy Gloo, may drop
// the last of them. So close() drops Gloo first.
void Gloo::close() {
  c10::intrusive_ptr<TaggedGloo> last;
  const std::lock_guard lock(mutex_);
  last.swap(gloo_);
}

bool Gloo::gathers_in_one_hop(size_t bytes) const {
  return all_ours_ && bytes <= kMaxOneHopBytes && gloo_->getSize() <= kMaxOneHopRanks;
}

void Gloo::gather_in_one_hop(const Call& call, const at::Tensor& all,
                             std::chrono::milliseconds timeout, c10::function_ref<void()> started) {
  c10d::Backend& gloo = prepare(call);
  at::Tensor rows = all;
  at::Tensor copies = all[gloo.getRank()].expand_as(all).contiguous();
  std::vector<int64_t> equal_splits;
  const auto options = with_timeout<c10d::AllToAllOptions>(timeout);
  const auto work = gloo.alltoall_base(rows, copies, equal_splits, equal_splits, options);
  started();
  work->wait();
}

at::Tensor Gloo::merge_in_tree(const Call& call, const at::Tensor& row, MergeRows merge,
                               std::chrono::milliseconds timeout,
                               c10::function_ref<void()> started) {
  started();  // the tag distinguishes the messages from those of later calls
  return merge_in_tree(tag_of(call), row, merge, timeout);
}

at::Tensor Gloo::merge_in_tree(uint64_t tag, const at::Tensor& row, MergeRows merge,
                               std::chrono::milliseconds timeout) {
  if (timeout == c10d::kUnsetTimeout) timeout = gloo_->getOptions()->timeout;
  // The tags of send and recv are non-negative ints.
  RowTree tree(*gloo_, static_cast<int>(tag & 0x7fffffff), merge, timeout);
  return tree.merged(row);
}

}  // namespace syncbn::dist::detail
