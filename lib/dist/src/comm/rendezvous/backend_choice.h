#pragma once

#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// What a rank asks for and has when it arrives.
struct Offer {
  int rank = 0;
  std::string backend;  ///< auto, gloo, nccl or cuda:gloo
  std::string gpu;      ///< kNoGpu, kTooFewGpus, or machine and PCI address
  std::string where;    ///< for messages: "host a (pid 7)"
};

constexpr const char* kNoGpu = "none";
constexpr const char* kTooFewGpus = "too few";  ///< for the workers of its host

/// What the ranks agree on.
struct BackendChoice {
  std::string backend;  ///< gloo, nccl or cuda:gloo; empty if refused
  std::string message;  ///< the refusal; or, if not empty, why auto leaves GPUs unused
};

/// NCCL takes one rank per GPU and has all ranks on GPUs: without one of its own for each rank,
/// auto chooses Gloo. A host without GPUs beside hosts with some is refused, since it is rarely
/// meant.
/// @param offers by rank, at least one.
BackendChoice choose_backend(const std::vector<Offer>& offers);

}  // namespace syncbn::dist::detail
