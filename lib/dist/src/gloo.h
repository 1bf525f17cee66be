#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace syncbn::dist::detail {

/// Connects a full mesh of the ranks over Gloo for each address that peers reach this host by; with
/// no address, over the one that Python's torch.distributed would choose.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size,
                                            const std::vector<std::string>& addresses,
                                            std::chrono::milliseconds timeout);

}  // namespace syncbn::dist::detail
