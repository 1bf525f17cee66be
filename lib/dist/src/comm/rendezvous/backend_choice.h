#pragma once

#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// What a rank asks for, and the GPU that it has, when it arrives.
struct Offer {
  int rank = 0;
  std::string backend;  ///< auto, gloo, nccl or cuda:gloo
  std::string gpu;      ///< kNoGpu, kTooFewGpus, or machine and PCI address
  std::string where;    ///< for messages: "host a (pid 7)"
};

constexpr const char* kNoGpu = "none";
constexpr const char* kTooFewGpus = "too few";  ///< its host has fewer GPUs than workers

/// What the ranks agree on.
struct BackendChoice {
  std::string backend;  ///< gloo, nccl or cuda:gloo; empty if refused
  std::string message;  ///< the refusal, or why auto leaves GPUs unused; may be empty
};

/// NCCL takes one rank per GPU and has all ranks on GPUs: unless each rank has its own GPU, auto
/// chooses Gloo. Ranks without a GPU beside ranks with one are refused, because that is rarely
/// intended.
/// @param offers by rank, at least one.
BackendChoice choose_backend(const std::vector<Offer>& offers);

}  // namespace syncbn::dist::detail
