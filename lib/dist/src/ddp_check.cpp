#include "ddp_check.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "world.h"

namespace syncbn::dist::detail {
namespace {

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::vector<std::string> describe(const std::vector<NamedTensor>& parameters) {
  std::vector<std::string> lines;
  for (const NamedTensor& parameter : parameters) {
    lines.push_back(fmt::format("{} {} {}", parameter.name, c10::str(parameter.tensor.sizes()),
                                c10::toString(parameter.tensor.scalar_type())));
  }
  return lines;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string first_difference(const std::vector<std::string>& first,
                             const std::vector<std::string>& own, int rank) {
  const auto [a, b] = std::mismatch(first.begin(), first.end(), own.begin(), own.end());
  return fmt::format(
      "DistributedDataParallel: the module differs between ranks: rank 0 has {}, rank {} has {} "
      "(parameter {} in order); build the same module on every rank",
      a == first.end() ? "nothing" : *a, rank, b == own.end() ? "nothing" : *b, a - first.begin());
}

/// Returns when `size` ranks have come.
void meet(c10d::Store& store, const std::string& key, int size, std::chrono::milliseconds timeout) {
  if (store.add(key, 1) == size) store.set(key + "/all", bytes("yes"));
  store.wait({key + "/all"}, timeout);
}

constexpr std::chrono::seconds kReadGrace{5};

}  // namespace

void check_same_parameters(const std::vector<NamedTensor>& parameters,
                           const ProcessGroupPtr& group) {
  const int size = group->getSize();
  const Backend* backend = backend_of(group);
  // Of a group made elsewhere nothing is known, and Python's ranks know nothing of these keys.
  if (size == 1 || backend == nullptr || !all_ranks_are_ours(group)) return;
  const auto timeout = backend->timeout();
  const auto store = group->getStore();
  const int rank = group->getRank();
  // How many modules this rank has wrapped: the same on all ranks.
  const int64_t number = store->add(fmt::format("syncbn/ddp/made_by/{}", rank), 1);
  const auto key = [number](const char* name) {
    return fmt::format("syncbn/ddp/{}/{}", number, name);
  };
  const std::vector<std::string> own = describe(parameters);
  std::vector<uint8_t> difference;
  try {
    if (rank == 0) store->set(key("parameters"), bytes(base::join(own, "\n")));
    store->wait({key("parameters")}, timeout);
    const std::vector<uint8_t> got = store->get(key("parameters"));
    const auto first = lines_of(std::string(got.begin(), got.end()));
    if (first != own) store->set(key("difference"), bytes(first_difference(first, own, rank)));
    meet(*store, key("compared"), size, timeout);
    if (!store->check({key("difference")})) return;
    difference = store->get(key("difference"));
  } catch (const c10::Error& error) {
    throw base::UnavailableError(fmt::format(
        "rank {} of {}: not every rank wrapped its module in DistributedDataParallel: {}", rank,
        size, error.what_without_backtrace()));
  }
  try {
    // The rank that holds the store may end now, and all must have read from it.
    meet(*store, key("read"), size, kReadGrace);
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch)
    // It has ended, or some rank has: the difference is what is to be told.
  }
  throw base::UserError(std::string(difference.begin(), difference.end()));
}

std::optional<at::Device> check_devices(const std::vector<at::Device>& devices,
                                        bool has_sync_batch_norm) {
  const at::Device first = devices.front();
  bool several = false;
  for (const at::Device& device : devices) {
    if (device.type() != first.type()) {
      throw base::UserError(
          fmt::format("DistributedDataParallel: the module has parameters on {} and on {}; move it "
                      "to one type of device",
                      first.str(), device.str()));
    }
    several = several || device != first;
  }
  if (!several) return first;
  if (has_sync_batch_norm) {
    throw base::UserError(fmt::format(
        "DistributedDataParallel: a module with SyncBatchNorm layers must be on one device, and "
        "this one begins on {} and goes on elsewhere; one process per device is the way",
        first.str()));
  }
  return std::nullopt;
}

void explain_unfinished_reduction(const std::string& complaint,
                                  const std::vector<NamedTensor>& parameters) {
  // "... Parameter indices which did not receive grad for rank 0: 2 3 ..."
  constexpr std::string_view kBeforeRank = "indices which did not receive grad for rank ";
  const size_t at = complaint.find(kBeforeRank);
  if (at == std::string::npos) return;
  std::istringstream indices(complaint.substr(at + kBeforeRank.size()));
  std::string rank_and_colon;
  indices >> rank_and_colon;
  std::vector<std::string> names;
  for (size_t index = 0; indices >> index && index < parameters.size();) {
    names.push_back(parameters[index].name);
  }
  if (names.empty()) return;
  throw base::UserError(fmt::format(
      "DistributedDataParallel: in the step before, these parameters got no gradient on this rank, "
      "and the others wait for it: {}; set find_unused_parameters (or static_graph, when they are "
      "the same in every step), let the loss use all of forward's outputs, or take them out of "
      "training (requires_grad)",
      base::join(names, ", ")));
}

}  // namespace syncbn::dist::detail
