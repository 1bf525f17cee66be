#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace syncbn::dist::detail {

/// Connects a full mesh of the ranks over Gloo. `address` is what peers reach this host by; the
/// environment variable GLOO_SOCKET_IFNAME names an interface instead, as it does in PyTorch.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size, const std::string& address,
                                            std::chrono::milliseconds timeout);

}  // namespace syncbn::dist::detail
