#include "rendezvous/backend_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace syncbn::dist::detail {
namespace {

std::string describe(const Offer& offer) {
  return fmt::format("rank {} on {}", offer.rank, offer.where);
}

/// Which rank has no GPU of its own; empty if each has one.
std::string why_not_one_gpu_each(const std::vector<Offer>& offers) {
  std::map<std::string, const Offer*> owners;
  for (const Offer& offer : offers) {
    if (offer.gpu == kTooFewGpus) return fmt::format("there is no GPU for {}", describe(offer));
    const auto [owner, is_new] = owners.emplace(offer.gpu, &offer);
    if (is_new) continue;
    // The PCI address, which follows the machine.
    const std::string address = offer.gpu.substr(offer.gpu.find(' ') + 1);
    return fmt::format("{} and {} share the GPU {}", describe(*owner->second), describe(offer),
                       address);
  }
  return "";
}

}  // namespace

BackendChoice choose_backend(const std::vector<Offer>& offers) {
  const auto is_auto = [](const Offer& offer) { return offer.backend == "auto"; };
  const auto asking = std::ranges::find_if_not(offers, is_auto);
  const Offer& first = asking == offers.end() ? offers.front() : *asking;
  // auto does not follow cuda:gloo, with which a rank chooses its GPU by another rule.
  const bool takes_auto = first.backend != "cuda:gloo";
  const auto other = std::ranges::find_if(offers, [&](const Offer& offer) {
    return offer.backend != first.backend && !(takes_auto && is_auto(offer));
  });
  if (other != offers.end()) {
    return {"", fmt::format("{} asks for backend {} and {} for {}; choose one backend for all",
                            describe(first), first.backend, describe(*other), other->backend)};
  }
  if (first.backend == "gloo" || first.backend == "cuda:gloo") return {first.backend, ""};

  const auto has_none = [](const Offer& offer) { return offer.gpu == kNoGpu; };
  const auto without = std::ranges::find_if(offers, has_none);
  const auto with = std::ranges::find_if_not(offers, has_none);
  if (with == offers.end()) return {"gloo", ""};
  if (without != offers.end()) {
    return {"", fmt::format("{} sees no GPU and {} does; find out why, or choose backend gloo",
                            describe(*without), describe(*with))};
  }
  const std::string lack = why_not_one_gpu_each(offers);
  if (lack.empty()) return {"nccl", ""};
  if (first.backend == "auto") {
    return {"gloo", fmt::format("backend auto leaves the GPUs unused: {}; start one worker per GPU "
                                "(--nproc_per_node=gpu) to use them",
                                lack)};
  }
  return {"",
          fmt::format("{}, and NCCL takes one rank per GPU; start one worker per GPU, or choose "
                      "backend cuda:gloo (device cuda, backend gloo) to share GPUs",
                      lack)};
}

}  // namespace syncbn::dist::detail
