#include "batch_norm/exchange.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/batch_norm_kernels.h"
#include "collectives/gather_rows.h"
#include "groups/world.h"
#include "monitor/flight_recorder.h"

namespace syncbn::dist::detail {

namespace {

// A header: layer, channels and dtype, number of the exchange, each exact in float64; all zero from
// a rank without input in a join() span. It follows the values of a row: the 2C + 1 statistics of a
// forward, or the 2C or 4C sums of a backward, so rows of the two never have the same length.
constexpr size_t kHeader = 3;
/// Replaces the layer in the header of a row that was merged from rows with different headers.
constexpr double kMixed = -1;
constexpr int64_t kDtypes = 256;  ///< upper bound on the values of at::ScalarType

/// Does not depend on compiler or standard library.
uint64_t hash_of(std::string_view bytes) {
  base::Fnv1a hash;
  hash.add_bytes(bytes);
  return hash.value();
}

using Values = at::ArrayRef<double>;

Values values_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<double>(), static_cast<size_t>(tensor.numel())};
}

/// [1, n] on the CPU: the parts, concatenated.
at::Tensor row_of(std::initializer_list<Values> parts) {
  size_t size = 0;
  for (const Values& part : parts) size += part.size();
  at::Tensor row = at::empty({1, static_cast<int64_t>(size)}, at::kDouble);
  double* to = row.mutable_data_ptr<double>();
  for (const Values& part : parts) to = std::copy(part.begin(), part.end(), to);
  return row;
}

/// [n]: the sum of the first n values of each row, in the order of rows.
at::Tensor add_up(const at::Tensor& rows, int64_t n) {
  at::Tensor total = at::empty({n}, at::kDouble);
  const double* row = rows.const_data_ptr<double>();
  double* const sums = total.mutable_data_ptr<double>();
  std::copy_n(row, n, sums);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    row += rows.size(1);
    for (int64_t i = 0; i < n; ++i) sums[i] += row[i];
  }
  return total;
}

/// The header that all rows share; kMixed if they differ. Ignores rows of ranks without input.
std::array<double, kHeader> common_header(const at::Tensor& rows) {
  std::array<double, kHeader> common{};
  const double* header = rows.const_data_ptr<double>() + rows.size(1) - kHeader;
  for (int64_t i = 0; i < rows.size(0); ++i, header += rows.size(1)) {
    if (header[0] == 0) continue;
    if (common[0] == 0) std::copy_n(header, kHeader, common.begin());
    if (!std::equal(common.begin(), common.end(), header)) common = {kMixed};
  }
  return common;
}

/// MergeRows of a forward.
at::Tensor merge_moments(const at::Tensor& rows) {
  const int64_t channels = (rows.size(1) - static_cast<int64_t>(kHeader) - 1) / 2;
  const at::Tensor merged = batch_norm_kernels(at::kCPU).merge(rows, channels, /*eps=*/0);
  return row_of({values_of(merged), common_header(rows)});
}

/// MergeRows of a backward.
at::Tensor merge_sums(const at::Tensor& rows) {
  const at::Tensor sums = add_up(rows, rows.size(1) - static_cast<int64_t>(kHeader));
  return row_of({values_of(sums), common_header(rows)});
}

/// The rows of all ranks, or one row if they are merged on the way.
at::Tensor collect(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group,
                   Timeout timeout) {
  if (step == JoinStep::kSums && !row.is_cpu()) return sum_rows(row, group, timeout);
  if (!merges_in_tree(row, group)) return gather_rows(row, group, timeout);
  return merge_in_tree(row, group, step == JoinStep::kSums ? merge_sums : merge_moments, timeout);
}

/// Whether rows with different headers were merged on the way; equal on all ranks.
/// @param rows from collect(), on the CPU.
bool are_mixed(const at::Tensor& rows) {
  const double* const end = rows.const_data_ptr<double>() + rows.size(1);
  return *(end - kHeader) == kMixed;
}

}  // namespace

struct Exchange::Layer {
  double hash;         ///< of its name, 52 bits
  double shape;        ///< channels and dtype
  const char* called;  ///< the name of its exchanges in logs and messages
};

struct Exchange::Group {
  explicit Group(const ProcessGroupPtr& group) : group(group), backend(backend_of(group)) {}

  /// Whether ranks must compare sizes before the exchange: in groups whose calls neither the
  /// backend nor a PeerMonitor compares, rows of different sizes would overwrite memory or hang.
  bool must_agree(const at::Tensor& row) const {
    return row.is_cpu() && (backend == nullptr || !backend->is_monitored());
  }

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  Backend* const backend;  ///< null: the group was made elsewhere
  std::atomic<uint64_t> exchanges = 0;
  std::unordered_map<uint64_t, size_t> numbers = {};  ///< of layers without a name, by id
  /// By hash of the name (or by id), channels and dtype.
  std::map<std::tuple<uint64_t, int64_t, at::ScalarType>, Layer> layers = {};
};

/// The groups and layers of this process.
struct Exchange::Names {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, Group> groups;
  std::unordered_map<uint64_t, std::string> layers;  ///< by hash
  std::set<std::string> texts;                       ///< Layer::called points to them

  static Names& instance() {
    static auto* const names = new Names();  // backward threads may outlive static destructors
    return *names;
  }

  // Callers of find() hold the lock.

  Group& find(const ProcessGroupPtr& group) {
    const auto found = groups.find(group.get());
    if (found != groups.end() && !found->second.group.expired()) return found->second;
    std::erase_if(groups, [](const auto& entry) { return entry.second.group.expired(); });
    return groups.try_emplace(group.get(), group).first->second;
  }

  const Layer& find(Group& group, const LayerName& layer, int64_t channels, at::ScalarType dtype) {
    const std::tuple key{layer.given.empty() ? layer.id : hash_of(layer.given), channels, dtype};
    const auto found = group.layers.find(key);
    if (found != group.layers.end()) return found->second;
    std::string text;
    if (layer.given.empty()) {
      const size_t next = group.numbers.size() + 1;
      text = fmt::format("layer #{}", group.numbers.try_emplace(layer.id, next).first->second);
    } else {
      text = fmt::format("layer '{}'", layer.given);
    }
    const uint64_t hash = hash_of(text) >> 12;
    const auto called =
        texts.insert(fmt::format("SyncBatchNorm {} ({}, {}): exchange", text,
                                 base::counted(channels, "channel"), c10::toString(dtype)));
    layers.try_emplace(hash, std::move(text));
    const Layer made{.hash = static_cast<double>(hash),
                     .shape = static_cast<double>(channels * kDtypes + static_cast<int64_t>(dtype)),
                     .called = called.first->c_str()};
    return group.layers.emplace(key, made).first->second;
  }

  /// @param header optionally followed by the number of values in the row.
  std::string describe(const std::vector<double>& header) {
    const std::lock_guard lock(mutex);
    const auto found = layers.find(static_cast<uint64_t>(header[0]));
    const auto shape = static_cast<int64_t>(header[1]);
    return fmt::format(
        "{} ({}, {}, exchange {}{})",
        found != layers.end() ? found->second : "a layer that this rank has not run",
        base::counted(shape / kDtypes, "channel"),
        c10::toString(static_cast<at::ScalarType>(shape % kDtypes)),
        static_cast<uint64_t>(header[2]),
        header.size() > kHeader
            ? fmt::format(" of {}", base::counted(static_cast<int64_t>(header[kHeader]), "value"))
            : "");
  }
};

Exchange::Exchange(const LayerName& layer, int64_t channels, at::ScalarType dtype,
                   const ProcessGroupPtr& group, Timeout timeout)
    : group_(group && group->getSize() > 1 ? group : ProcessGroupPtr()), timeout_(timeout) {
  if (!group_) return;
  Names& names = Names::instance();
  const std::lock_guard lock(names.mutex);
  state_ = &names.find(group_);
  layer_ = &names.find(*state_, layer, channels, dtype);
}

/// @param rows of all ranks, each with a header from column `first` to its end.
void Exchange::compare(const at::Tensor& rows, int64_t first) const {
  const int64_t stride = rows.size(1);
  const double* const headers = rows.const_data_ptr<double>() + first;
  const auto bytes = static_cast<size_t>(stride - first) * sizeof(double);
  int64_t equal = 1;
  while (equal < rows.size(0) && std::memcmp(headers + equal * stride, headers, bytes) == 0) {
    ++equal;
  }
  if (equal == rows.size(0)) return;

  std::map<std::vector<double>, std::vector<std::string>> ranks;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const double* const one = headers + rank * stride;
    if (one[0] == 0) continue;  // without input in a join() span
    ranks[{one, one + (stride - first)}].push_back(std::to_string(world_rank(group_, rank)));
  }
  if (ranks.size() < 2) return;
  std::vector<std::string> places;
  for (const auto& [header, members] : ranks) {
    places.push_back(fmt::format("rank{} {} in {}", members.size() > 1 ? "s" : "",
                                 base::join(members, ", "), Names::instance().describe(header)));
  }
  throw base::UserError(fmt::format(
      "SyncBatchNorm: the ranks are in different layers: {}; every rank of a group must run the "
      "same layers in the same order, with equally many forwards and backwards",
      base::join(places, "; ")));
}

at::Tensor Exchange::exchange(JoinStep step, const at::Tensor& values) const {
  const std::array<double, kHeader> header{layer_->hash, layer_->shape,
                                           static_cast<double>(++state_->exchanges)};
  const at::Tensor row =
      values.is_cpu() ? row_of({values_of(values), header}) : values.unsqueeze(0);
  announce_exchange(step, row, group_);
  if (state_->must_agree(row)) {
    const at::Tensor own = row_of({header, static_cast<double>(row.size(1))});
    compare(gather_one_by_one(own, group_, timeout_, layer_->called), 0);
  }
  const NamedAs named(layer_->called, row.sizes());
  const at::Tensor rows = collect(step, row, group_, timeout_);
  if (!row.is_cpu()) return rows;
  if (are_mixed(rows)) compare(gather_rows(row_of({header}), group_, timeout_), 0);
  compare(rows, values.numel());
  return rows;
}

at::Tensor Exchange::moments(const at::Tensor& own) const {
  return group_ ? exchange(JoinStep::kMoments, own) : own.unsqueeze(0);
}

at::Tensor Exchange::sums(const at::Tensor& own) const {
  if (!group_) return own;
  const at::Tensor rows = exchange(JoinStep::kSums, own);
  return rows.is_cpu() ? add_up(rows, own.numel()) : rows[0];
}

void join_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group) {
  Exchange::Names& names = Exchange::Names::instance();
  const Exchange::Group* state = nullptr;
  {
    const std::lock_guard lock(names.mutex);
    Exchange::Group& found = names.find(group);
    ++found.exchanges;
    state = &found;
  }
  if (state->must_agree(row)) {
    gather_one_by_one(at::zeros({1, kHeader + 1}, at::kDouble), group, std::nullopt, "join()");
  }
  const NamedAs named("join()", row.sizes());
  const at::Tensor rows = collect(step, row, group, std::nullopt);
  if (row.is_cpu() && are_mixed(rows)) gather_rows(at::zeros({1, kHeader}, at::kDouble), group);
}

}  // namespace syncbn::dist::detail
