#include "groups/own_gpu.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/log.h>
#include <syncbn/base/machine_id.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <cctype>
#include <map>

#include <ATen/Context.h>

#include "groups/cuda_support.h"
#include "rendezvous/arrival.h"

namespace syncbn::dist::detail {
namespace {

/// Offer::backend for a backend in any of PyTorch's spellings.
std::string canonical_backend(const std::string& given) {
  static const std::map<std::string, std::string> spellings = {
      {"auto", "auto"},
      {"gloo", "gloo"},
      {"cpu:gloo", "gloo"},
      {"nccl", "nccl"},
      {"cuda:nccl", "nccl"},
      {"cpu:gloo,cuda:nccl", "nccl"},
      {"cuda:nccl,cpu:gloo", "nccl"},
      {"cuda:gloo", "cuda:gloo"},
      {"cpu:gloo,cuda:gloo", "cuda:gloo"},
      {"cuda:gloo,cpu:gloo", "cuda:gloo"},
  };
  std::string lower = given;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto found = spellings.find(lower);
  if (found != spellings.end()) return found->second;
  throw base::UserError(
      fmt::format("backend '{}' is not known; it is auto, gloo, nccl, or by device cpu:gloo, "
                  "cuda:nccl, cuda:gloo, cpu:gloo,cuda:nccl or cpu:gloo,cuda:gloo",
                  given));
}

/// Why this process cannot use a GPU; empty if it can.
std::string why_no_gpu() {
  // Loading libtorch's CUDA part takes seconds.
  if (base::count_gpus_at_hand() == 0) return "this host has no visible GPU";
  const CudaSupport* const cuda = cuda_support();
  if (cuda == nullptr) {
    return "the CUDA part of this library does not load: " + cuda_support_error();
  }
  if (const std::string unusable = cuda->why_unusable(); !unusable.empty()) return unusable;
  if (cuda->device_count() == 0) return "this host has no visible GPU";
  if (at::globalContext().hasCUDA()) return "";
  throw base::UserError(
      "libtorch was asked for CUDA before the CUDA part of this library was loaded, and does not "
      "look again: call syncbn::dist::init_process_group() before at::manual_seed() and anything "
      "else that may use a GPU, or choose backend gloo to train on the CPU");
}

}  // namespace

OwnGpu find_own_gpu(const std::string& given, std::optional<int> index) {
  OwnGpu own;
  Offer& offer = own.offer;
  offer.backend = canonical_backend(given);
  offer.gpu = kNoGpu;
  offer.where = fmt::format("host {} (pid {})", base::hostname(), ::getpid());
  if (offer.backend == "gloo") return own;

  const bool is_auto = offer.backend == "auto";
  const bool was_given_gpu = base::env_int("SYNCBN_GPU_PER_WORKER", 0, 1).value_or(0) == 1;
  const bool may_do_without = is_auto && !was_given_gpu;
  if (const std::string why = why_no_gpu(); !why.empty()) {
    if (may_do_without) {
      // Users expect the CPU if there is no GPU, or if the program was not built for GPUs.
      const bool surprises = local_rank() == 0 && base::count_gpus_at_hand() != 0 &&
                             cuda_support() != nullptr && !cuda_support()->why_unusable().empty();
      spdlog::log(surprises ? spdlog::level::warn : spdlog::level::debug,
                  "backend auto leaves the GPUs unused: {}", why);
      return own;
    }
    throw base::UserError(fmt::format(
        "{}, and {}; choose backend gloo (device cpu) to train on the CPU",
        is_auto ? "backend auto: the launcher gave this worker a GPU (--nproc_per_node=gpu or "
                  "auto, or --virtual_local_rank)"
                : fmt::format("backend {} (device cuda) needs a GPU", given),
        why));
  }

  const int devices = cuda_support()->device_count();
  own.index = index.value_or(devices == 1 ? 0 : local_rank());
  if (own.index >= devices && offer.backend == "cuda:gloo") own.index %= devices;
  if (own.index < devices) {
    offer.gpu = base::machine_id() + " " + cuda_support()->pci_address(own.index);
  } else if (may_do_without) {
    offer.gpu = kTooFewGpus;
  } else {
    throw base::UserError(
        fmt::format("LOCAL_RANK={} has no GPU: this process sees {}; start at most that many "
                    "workers per host (and see CUDA_VISIBLE_DEVICES), or choose backend gloo",
                    local_rank(), devices));
  }
  return own;
}

}  // namespace syncbn::dist::detail
