#pragma once

#include <chrono>
#include <cstdint>
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

/// What the messages of the next collective are matched by: ranks that set different tags wait for
/// each other instead of overwriting each other's tensors. Of a backend that make_gloo() made.
void set_next_tag(c10d::Backend& gloo, uint32_t tag);

/// From here on tags of send and recv are break_off()'s.
constexpr int kReservedTags = 0x7fff0000;

/// Makes everything that is under way fail now, and all that comes after it. Any thread may call
/// it.
void break_off(c10d::Backend& gloo);

}  // namespace syncbn::dist::detail
