#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "fake_cuda.h"
#include "operations.h"

namespace fake_nccl {
namespace {

/// A send or recv in progress.
class Moving {
 public:
  Moving(ncclComm& communicator, const Transfer& transfer)
      : transfer_(transfer),
        mail_(transfer.sends ? communicator.mailbox(communicator.rank, transfer.peer)
                             : communicator.mailbox(transfer.peer, communicator.rank)),
        buffer_(static_cast<char*>(fake_cuda::host(transfer.buffer))) {}

  bool is_done() const { return moved_ == transfer_.bytes; }
  std::pair<int, bool> direction() const { return {transfer_.peer, transfer_.sends}; }

  /// Moves a piece if the peer is ready. Waits forever if the recv's size is not the send's.
  void advance() {
    if (mail_.is_full == transfer_.sends) return;
    if (transfer_.sends) {
      mail_.total = transfer_.bytes;
      mail_.bytes = std::min(kMailBytes, transfer_.bytes - moved_);
      std::memcpy(mail_.piece.data(), buffer_ + moved_, mail_.bytes);
    } else {
      if (mail_.total != transfer_.bytes) return;
      std::memcpy(buffer_ + moved_, mail_.piece.data(), mail_.bytes);
    }
    moved_ += mail_.bytes;
    mail_.is_full = transfer_.sends;
  }

 private:
  const Transfer transfer_;
  Mailbox& mail_;
  char* const buffer_;
  size_t moved_ = 0;
};

}  // namespace

void run(ncclComm& communicator, std::vector<Transfer> transfers) {
  std::vector<Moving> moving;
  for (const Transfer& transfer : transfers) moving.emplace_back(communicator, transfer);
  communicator.wait([&moving] {
    bool are_done = true;
    std::set<std::pair<int, bool>> busy;
    for (Moving& one : moving) {
      if (one.is_done()) continue;
      are_done = false;
      if (busy.insert(one.direction()).second) one.advance();
    }
    return are_done;
  });
}

}  // namespace fake_nccl
