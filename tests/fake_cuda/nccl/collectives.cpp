#include <algorithm>
#include <cstring>

#include "fake_cuda.h"
#include "operations.h"

namespace fake_nccl {
namespace {

using fake_cuda::host;

/// One collective, in steps of at most kSlotBytes per rank.
class Steps {
 public:
  Steps(ncclComm& communicator, const Collective& collective)
      : communicator_(communicator),
        collective_(collective),
        from_(static_cast<const char*>(host(collective.send))),
        to_(static_cast<char*>(host(collective.receive))),
        unit_(size_of(collective.type)),
        bytes_(collective.count * unit_),
        header_{.kind = static_cast<int32_t>(collective.kind), .bytes = bytes_} {
    if (!collective.reduces()) return;
    header_.type = collective.type;
    header_.operation = collective.operation;
  }

  void run() {
    const int rank = communicator_.rank;
    const int root = collective_.root;
    switch (collective_.kind) {
      case Kind::kAllReduce:
        return run(from_, [this](size_t at, size_t n) { reduce_into(to_ + at, n); });
      case Kind::kReduce:
        header_.root = root;
        return run(from_, [this, is_root = rank == root](size_t at, size_t n) {
          if (is_root) reduce_into(to_ + at, n);
        });
      case Kind::kBroadcast:
        header_.root = root;
        return run(rank == root ? from_ : nullptr, [this, root](size_t at, size_t n) {
          std::memcpy(to_ + at, communicator_.slot(root), n);
        });
      case Kind::kAllGather:
        return run(from_, [this](size_t at, size_t n) {
          for (int peer = 0; peer < communicator_.ranks; ++peer) {
            std::memcpy(to_ + static_cast<size_t>(peer) * bytes_ + at, communicator_.slot(peer), n);
          }
        });
      case Kind::kReduceScatter:
        for (int part = 0; part < communicator_.ranks; ++part) {
          header_.root = part;
          run(from_ + static_cast<size_t>(part) * bytes_,
              [this, is_own = part == rank](size_t at, size_t n) {
                if (is_own) reduce_into(to_ + at, n);
              });
        }
    }
  }

 private:
  /// @param from this rank's bytes; null if it publishes none
  template <class Consume>
  void run(const char* from, Consume consume) {
    for (size_t at = 0; at < bytes_; at += kSlotBytes) {
      const size_t n = std::min(kSlotBytes, bytes_ - at);
      communicator_.step(
          header_,
          [&] {
            if (from != nullptr) std::memcpy(communicator_.slot(communicator_.rank), from + at, n);
          },
          [&] { consume(at, n); });
    }
  }

  void reduce_into(char* into, size_t n) {
    std::vector<const void*> slots;
    for (int peer = 0; peer < communicator_.ranks; ++peer)
      slots.push_back(communicator_.slot(peer));
    reduce(into, slots, n / unit_, collective_.type, collective_.operation);
  }

  ncclComm& communicator_;
  const Collective& collective_;
  const char* const from_;
  char* const to_;
  const size_t unit_;
  const size_t bytes_;
  Header header_;
};

static_assert(kSlotBytes % 8 == 0, "no element lies in two steps");

}  // namespace

void run(ncclComm& communicator, const Collective& collective) {
  Steps(communicator, collective).run();
}

}  // namespace fake_nccl
