#include "batch_norm/exchange.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "collectives/gather_rows.h"
#include "ddp/join_statistics.h"
#include "groups/call_log.h"
#include "groups/world.h"

namespace syncbn::dist::detail {

std::atomic<uint64_t> LayerName::made{0};

namespace {

// A header: layer, channels and dtype, number of the exchange; all zero from a rank that has no
// input in a join() span. Float64 holds each exactly. With 2C + 1 statistics, and 2C or 4C sums, a
// row that is gathered never has as many values as one that is summed (which carries 1, h and h^2
// for a hash h of the header), so that the two are never taken for each other.
constexpr int64_t kHeader = 3;
constexpr int64_t kDtypes = 256;
/// A header and the number of values in the row.
constexpr int64_t kAgreed = kHeader + 1;

/// Whether rows of different sizes would overwrite memory or be waited for: neither the group's
/// backend nor a PeerWatch compares calls.
bool must_agree(const at::Tensor& row, const ProcessGroupPtr& group) {
  if (!row.is_cpu()) return false;
  const Backend* const backend = backend_of(group);
  return backend == nullptr || !backend->is_watched();
}

/// What is known of a group: how many exchanges it had, and its layers without a name.
struct GroupState {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  uint64_t exchanges = 0;
  std::unordered_map<uint64_t, size_t> layer_numbers = {};
};

struct Names {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, GroupState> groups;
  std::unordered_map<uint64_t, std::string> layers;  ///< by hash
  std::set<std::string> texts;                       ///< logs keep pointers to them
};

Names& names() {
  static auto* const instance = new Names();  // backward threads may outlive static destructors
  return *instance;
}

/// With the lock held.
GroupState& state_of(Names& all, const ProcessGroupPtr& group) {
  const auto found = all.groups.find(group.get());
  if (found != all.groups.end() && !found->second.group.expired()) return found->second;
  std::erase_if(all.groups, [](const auto& entry) { return entry.second.group.expired(); });
  const auto made = all.groups.emplace(
      group.get(), GroupState{.group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)});
  return made.first->second;
}

uint64_t next_number(const ProcessGroupPtr& group) {
  Names& all = names();
  const std::lock_guard lock(all.mutex);
  return ++state_of(all, group).exchanges;
}

/// The same in every process, whatever it was built with.
uint64_t hash_of(std::string_view bytes) {
  base::Fnv1a hash;
  hash.add_bytes(bytes);
  return hash.value();
}

std::string known_layer(uint64_t hash) {
  Names& all = names();
  const std::lock_guard lock(all.mutex);
  const auto found = all.layers.find(hash);
  return found != all.layers.end() ? found->second : "a layer that this rank has not run";
}

/// @param header with the number of values, or without.
std::string describe(const std::vector<double>& header) {
  const auto shape = static_cast<int64_t>(header[1]);
  const std::string values =
      header.size() > kHeader ? fmt::format(" of {} values", header[kHeader]) : "";
  return fmt::format("{} ({} channels, {}, exchange {}{})",
                     known_layer(static_cast<uint64_t>(header[0])), shape / kDtypes,
                     c10::toString(static_cast<at::ScalarType>(shape % kDtypes)),
                     static_cast<uint64_t>(header[2]), values);
}

/// Of a header, in 16 bits: sums of squares of such numbers are exact.
double short_hash(const at::Tensor& header) {
  const std::string_view bytes(reinterpret_cast<const char*>(header.const_data_ptr<double>()),
                               kHeader * sizeof(double));
  const uint64_t hash = hash_of(bytes);
  return static_cast<double>((hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48)) & 0xffff);
}

/// Whether n numbers are equal, by n * (sum of squares) = (sum)^2.
bool all_equal(const double* sums) {
  const auto n = static_cast<uint64_t>(sums[0]);
  const auto total = static_cast<uint64_t>(sums[1]);
  return n * static_cast<uint64_t>(sums[2]) == total * total;
}

at::Tensor doubles(std::initializer_list<double> values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor;
}

}  // namespace

Exchange::Exchange(const LayerName& layer, int64_t channels, at::ScalarType dtype,
                   const ProcessGroupPtr& group, Timeout timeout)
    : group_(group && group->getSize() > 1 ? group : ProcessGroupPtr()),
      timeout_(timeout),
      channels_(channels),
      dtype_(dtype) {
  if (!group_) return;
  Names& all = names();
  const std::lock_guard lock(all.mutex);
  auto& numbers = state_of(all, group_).layer_numbers;
  std::string text;
  if (layer.given.empty()) {
    const size_t number = numbers.try_emplace(layer.id, numbers.size() + 1).first->second;
    text = fmt::format("layer #{}", number);
  } else {
    text = fmt::format("layer '{}'", layer.given);
  }
  layer_ = hash_of(text) >> 12;  // as many bits as float64 holds
  called_ = all.texts
                .insert(fmt::format("SyncBatchNorm {} ({} channels, {}): exchange", text, channels,
                                    c10::toString(dtype)))
                .first->c_str();
  all.layers.try_emplace(layer_, std::move(text));
}

at::Tensor Exchange::header(uint64_t number) const {
  const int64_t shape = channels_ * kDtypes + static_cast<int64_t>(dtype_);
  return doubles(
      {static_cast<double>(layer_), static_cast<double>(shape), static_cast<double>(number)});
}

void Exchange::compare(const at::Tensor& headers) const {
  const int64_t stride = headers.stride(0);
  const double* const first = headers.const_data_ptr<double>();
  const Backend* const backend = backend_of(group_);
  std::map<std::vector<double>, std::vector<std::string>> ranks;
  for (int64_t rank = 0; rank < headers.size(0); ++rank) {
    const double* const one = first + rank * stride;
    if (one[0] == 0) continue;
    // Messages name ranks of the world.
    const int64_t named =
        backend != nullptr ? backend->members().ranks[static_cast<size_t>(rank)] : rank;
    ranks[{one, one + headers.size(1)}].push_back(std::to_string(named));
  }
  if (ranks.size() < 2) return;
  std::string who;
  for (const auto& [at, members] : ranks) {
    who += fmt::format("{}rank{} {} in {}", who.empty() ? "" : "; ", members.size() > 1 ? "s" : "",
                       base::join(members, ", "), describe(at));
  }
  throw base::UserError(fmt::format(
      "SyncBatchNorm: the ranks are in different layers: {}; every rank of a group runs the same "
      "layers in the same order, each with as many forwards and backwards",
      who));
}

void Exchange::agree(uint64_t number, const at::Tensor& row) const {
  if (!must_agree(row, group_)) return;
  const at::Tensor own = at::cat({header(number), doubles({static_cast<double>(row.size(1))})});
  compare(gather_one_by_one(own.unsqueeze(0), group_, timeout_, called_));
}

at::Tensor Exchange::gather(const at::Tensor& values) const {
  if (!group_) return values.unsqueeze(0);
  const uint64_t number = next_number(group_);
  // To look at what is on a GPU is to wait for it: there nothing is compared.
  const bool compares = values.is_cpu();
  const at::Tensor row = (compares ? at::cat({values, header(number)}) : values).unsqueeze(0);
  announce_gather(row, group_);
  agree(number, row);
  const NamedAs named(called_, row.sizes());
  at::Tensor all = gather_rows(row, group_, timeout_);
  if (!compares) return all;
  compare(all.narrow(1, values.size(0), kHeader));
  return all.narrow(1, 0, values.size(0));
}

at::Tensor Exchange::sum(const at::Tensor& values) const {
  if (!group_) return values;
  const uint64_t number = next_number(group_);
  if (!values.is_cpu()) {
    const at::Tensor row = values.unsqueeze(0);
    announce_sum(row, group_);
    const NamedAs named(called_, row.sizes());
    return sum_rows(row, group_, timeout_);
  }
  const at::Tensor own = header(number);
  const double hash = short_hash(own);
  const at::Tensor row = at::cat({values, doubles({1, hash, hash * hash})}).unsqueeze_(0);
  announce_sum(row, group_);
  agree(number, row);
  const NamedAs named(called_, row.sizes());
  const at::Tensor total = sum_rows(row, group_, timeout_);
  // All ranks see the same sums, so all of them take part in this.
  if (!all_equal(total.const_data_ptr<double>() + values.size(0))) {
    compare(gather_rows(own.unsqueeze(0), group_, timeout_));
  }
  return total.narrow(0, 0, values.size(0));
}

void join_exchange(const at::Tensor& row, const ProcessGroupPtr& group) {
  next_number(group);
  if (must_agree(row, group)) {
    gather_one_by_one(at::zeros({1, kAgreed}, at::kDouble), group, std::nullopt, "join()");
  }
}

}  // namespace syncbn::dist::detail
