// What collectives, sends and recvs do when their stream reaches them.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

#include "communicator.h"

namespace fake_nccl {

enum class Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter };

/// Arguments of a collective; `count` and the buffers mean the same as in NCCL's function.
struct Collective {
  Kind kind = Kind::kAllReduce;
  const char* name = "";
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t operation = ncclSum;
  int root = 0;

  bool reduces() const { return kind != Kind::kBroadcast && kind != Kind::kAllGather; }
};

struct Transfer {
  bool sends = false;
  void* buffer = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

void run(ncclComm& communicator, const Collective& collective);

/// Makes progress with all transfers at the same time; transfers with the same peer stay in order.
void run(ncclComm& communicator, std::vector<Transfer> transfers);

}  // namespace fake_nccl
