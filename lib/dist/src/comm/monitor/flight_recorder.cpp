#include "monitor/flight_recorder.h"

#include <c10/util/accumulate.h>
#include <c10/util/hash.h>
#include <fmt/format.h>
#include <syncbn/dist/plain_message.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace syncbn::dist::detail {
namespace {

const char* name_of_op(int reduce_op) {
  constexpr std::array kNames{"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                              "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  const auto index = static_cast<size_t>(reduce_op);
  return index < kNames.size() ? kNames[index] : "another operation";
}

/// The name in torch's flight records, by which fr_trace recognises the operation.
const char* torch_name(const Call& call) {
  using c10d::OpType;
  static constexpr std::pair<OpType, const char*> kNames[] = {
      {OpType::BROADCAST, "broadcast"},
      {OpType::ALLREDUCE_COALESCED, "allreduce_coalesced"},
      {OpType::REDUCE, "reduce"},
      {OpType::ALLGATHER, "all_gather"},
      {OpType::_ALLGATHER_BASE, "_all_gather_base"},
      {OpType::ALLGATHER_COALESCED, "ALLGATHER_coalesced"},
      {OpType::GATHER, "gather"},
      {OpType::SCATTER, "scatter"},
      {OpType::REDUCE_SCATTER, "reduce_scatter"},
      {OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base"},
      {OpType::ALLTOALL, "all_to_all"},
      {OpType::ALLTOALL_BASE, "all_to_all"},
      {OpType::SEND, "send"},
      {OpType::RECV, "recv"},
      {OpType::BARRIER, "all_reduce_barrier"}};
  const auto* const found =
      std::ranges::find(kNames, call.type, &std::pair<OpType, const char*>::first);
  return found == std::end(kNames) ? "all_reduce" : found->second;
}

}  // namespace

uint16_t Call::fingerprint() const {
  size_t hash = c10::get_hash(static_cast<int>(type), static_cast<int>(dtype), root, reduce_op);
  for (const int64_t size : sizes) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  hash = c10::hash_combine(hash, has_sizes ? sizes.size() : SIZE_MAX);
  if (others) hash = c10::hash_combine(hash, c10::get_hash(std::string(name), *others));
  hash ^= hash >> 32;
  hash ^= hash >> 16;
  return static_cast<uint16_t>(hash);
}

int64_t Call::elements() const {
  return c10::multiply_integers(sizes);
}

std::string Call::describe() const {
  std::string text = name;
  if (dtype != at::ScalarType::Undefined) text += fmt::format(" of {}", c10::toString(dtype));
  if (has_sizes) text += fmt::format(" {}", c10::str(at::IntArrayRef(sizes)));
  if (others) text += fmt::format("{:.1000}", *others);
  if (reduce_op > 0) text += fmt::format(" by {}", name_of_op(reduce_op));
  if (root >= 0) text += fmt::format(" with root {}", root);
  return text;
}

std::string Call::numbered() const {
  return fmt::format("{} #{}", name, sequence);
}

thread_local const NamedAs* NamedAs::current_ = nullptr;

NamedAs::NamedAs(const char* name, at::IntArrayRef sizes) : name_(name), sizes_(sizes) {
  if (current_ == nullptr) current_ = this;
}

NamedAs::~NamedAs() {
  if (current_ == this) current_ = nullptr;
}

void NamedAs::apply_to(Call& call) {
  if (current_ == nullptr) return;
  call.name = current_->name_;
  call.sizes.assign(current_->sizes_.begin(), current_->sizes_.end());
}

FlightRecorder::FlightRecorder(std::string group, std::vector<int> ranks, Abort abort,
                               std::shared_ptr<base::FlightRecord> record)
    : group_(std::move(group)),
      ranks_(std::move(ranks)),
      abort_(std::move(abort)),
      record_(std::move(record)),
      group_in_record_(record_ ? record_->add_group(group_, ranks_) : 0) {}

FlightRecorder::~FlightRecorder() {
  for (Entry& entry : collectives_) static_cast<void>(end(entry, State::kFailed));
  for (Entry& entry : transfers_) static_cast<void>(end(entry, State::kFailed));
}

bool FlightRecorder::has_member(int rank) const {
  return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end();
}

void FlightRecorder::abort(const Call& call) {
  set_failed(call);
  std::optional<Clock::time_point> since;
  visit_pending([&since](const Entry& entry) {
    if (!entry.is_awaited || entry.runs_on_gpu()) return;
    since = std::min(since.value_or(entry.awaited_since), entry.awaited_since);
  });
  abort_(since);
}

void FlightRecorder::set_failed(const Call& call) {
  const std::lock_guard lock(mutex_);
  if (!failed_ || failed_->sequence == 0) failed_ = call;
}

std::optional<Call> FlightRecorder::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void FlightRecorder::close() {
  const std::lock_guard lock(mutex_);
  was_closed_ = !failed_;
}

bool FlightRecorder::was_closed() const {
  const std::lock_guard lock(mutex_);
  return was_closed_;
}

uint64_t FlightRecorder::begin_in_record(const Call& call) {
  if (!record_) return 0;
  return record_->begin({.kind = torch_name(call),
                         .dtype = call.dtype == at::ScalarType::Undefined
                                      ? ""
                                      : std::string_view(c10::toString(call.dtype)),
                         .name = call.name,
                         .sequence = call.sequence,
                         .peer = call.peer,
                         .group = group_in_record_,
                         .sizes = call.sizes.data(),
                         .dimensions = call.sizes.size()});
}

uint64_t FlightRecorder::next_with(int peer, c10d::OpType type) const {
  const std::lock_guard lock(mutex_);
  const auto found = transfers_by_rank_.find({peer, type});
  return found == transfers_by_rank_.end() ? 1 : found->second.begun + 1;
}

FlightRecorder::TransfersByRank FlightRecorder::transfers() const {
  const std::lock_guard lock(mutex_);
  return transfers_by_rank_;
}

FlightRecorder::Completion FlightRecorder::begin(const Call& call, Timeout timeout,
                                                 int64_t traced_since) {
  const std::lock_guard lock(mutex_);
  Entry entry{.call = call,
              .since = Clock::now(),
              .timeout = timeout,
              .number = begin_in_record(call),
              .traced_since = traced_since};
  if (call.is_collective()) {
    last_ = call.sequence;
    Entry& slot = collectives_[call.sequence % kKept];
    Completion dropped = end(slot, State::kFailed);  // if its end was never reported
    slot = std::move(entry);
    return dropped;
  }
  transfers_.remove_if([](const Entry& old) { return !old.is_pending(); });
  Transfers& with_peer = transfers_by_rank_[{call.peer, call.type}];
  ++with_peer.begun;
  if (timeout) ++with_peer.done;
  transfers_.push_back(std::move(entry));
  return {};
}

void FlightRecorder::set_completion(const Call& call, std::function<bool()> is_done,
                                    std::function<std::chrono::nanoseconds()> time_on_gpu) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = entry_of(call);
  if (entry == nullptr || !entry->is_pending()) return;
  if (entry->runs_on_gpu()) trace(*entry);  // a traced call on a GPU ends when it is queued
  if (!is_done) {
    static_cast<void>(end(*entry, State::kSucceeded));  // it has no completion
    return;
  }
  entry->completion = {std::move(is_done), std::move(time_on_gpu)};
}

void FlightRecorder::await(const Call& call, bool is_blocked) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = entry_of(call);
  if (entry == nullptr || !entry->is_pending()) return;
  if (is_blocked && entry->blocked_since == 0) entry->blocked_since = trace_time();
  if (std::exchange(entry->is_awaited, true)) return;
  entry->awaited_since = Clock::now();
  if (record_) record_->await(entry->number);
}

FlightRecorder::Completion FlightRecorder::end(Entry& entry, State state,
                                               std::chrono::nanoseconds on_gpu) {
  if (record_ && entry.number != 0 && entry.is_pending()) {
    record_->end(
        entry.number,
        state == State::kFailed ? base::FlightLayout::kFailed : base::FlightLayout::kSucceeded,
        entry.is_awaited, on_gpu);
  }
  if (entry.is_pending() && state == State::kSucceeded && !entry.runs_on_gpu()) trace(entry);
  entry.state = state;
  return std::exchange(entry.completion, {});
}

void FlightRecorder::trace(const Entry& entry) const {
  const int64_t end = trace_time();
  if (entry.traced_since == 0 || end == 0) return;
  const Call& call = entry.call;
  add_to_trace({.name = call.name,
                .peer = call.peer,
                .begin = entry.traced_since,
                .end = end,
                .waited_from = entry.blocked_since != 0 ? entry.blocked_since : -1});
}

FlightRecorder::Entry* FlightRecorder::entry_of(const Call& call) {
  if (call.is_collective()) {
    Entry& entry = collectives_[call.sequence % kKept];
    return entry.call.sequence == call.sequence ? &entry : nullptr;
  }
  for (Entry& entry : transfers_) {
    if (entry.call.sequence == call.sequence) return &entry;
  }
  return nullptr;
}

void FlightRecorder::succeed(const Call& call, std::chrono::nanoseconds on_gpu) {
  Completion dropped;
  const std::lock_guard lock(mutex_);
  Entry* const entry = entry_of(call);
  if (entry == nullptr || !entry->is_pending()) return;  // it may have failed meanwhile
  if (!call.is_collective() && !entry->timeout) {
    ++transfers_by_rank_[{call.peer, call.type}].done;
  }
  dropped = end(*entry, State::kSucceeded, on_gpu);
}

void FlightRecorder::fail(const Call& call) {
  set_failed(call);
  Completion dropped;
  const std::lock_guard lock(mutex_);
  if (Entry* entry = entry_of(call)) dropped = end(*entry, State::kFailed);
}

void FlightRecorder::refuse(const Call& call) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = entry_of(call);
  if (entry == nullptr) return;  // begin() was not called
  if (record_) record_->remove(entry->number);
  if (!call.is_collective()) {
    Transfers& with_peer = transfers_by_rank_[{call.peer, call.type}];
    --with_peer.begun;
    if (entry->timeout) --with_peer.done;
    transfers_.remove_if([&call](const Entry& one) { return one.call.sequence == call.sequence; });
  } else {
    // With last_ back, the slot stands for call `sequence - kKept` again, which has ended long ago.
    *entry = {};
    entry->state = State::kSucceeded;
    last_ = call.sequence - 1;
  }
}

template <class Visit>
void FlightRecorder::visit_pending(const Visit& visit) const {
  const std::lock_guard lock(mutex_);
  for (uint64_t n = oldest(); n <= last_; ++n) {
    if (const Entry& entry = collectives_[n % kKept]; entry.is_pending()) visit(entry);
  }
  for (const Entry& entry : transfers_) {
    if (entry.is_pending()) visit(entry);
  }
}

void FlightRecorder::update() {
  std::vector<std::pair<Call, Completion>> asked;
  visit_pending([&asked](const Entry& entry) {
    if (entry.completion.is_done) asked.emplace_back(entry.call, entry.completion);
  });
  for (const auto& [call, completion] : asked) {
    try {
      if (!completion.is_done()) continue;
      succeed(call, completion.time_on_gpu ? completion.time_on_gpu() : std::chrono::nanoseconds());
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      if (!transport_error_) transport_error_ = {plain_message(error), call, Clock::now()};
      return;
    }
  }
}

std::optional<FlightRecorder::TransportError> FlightRecorder::transport_error() const {
  const std::lock_guard lock(mutex_);
  return transport_error_;
}

std::vector<FlightRecorder::Pending> FlightRecorder::pending() const {
  std::vector<Pending> result;
  visit_pending([&result](const Entry& entry) {
    result.push_back({entry.call, entry.since, entry.timeout});
  });
  return result;
}

std::optional<Call> FlightRecorder::find(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  const Entry& entry = collectives_[sequence % kKept];
  if (sequence == 0 || entry.call.sequence != sequence) return std::nullopt;
  return entry.call;
}

std::optional<Call> FlightRecorder::last_collective() const {
  const std::lock_guard lock(mutex_);
  if (last_ == 0) return std::nullopt;
  return collectives_[last_ % kKept].call;
}

uint64_t FlightRecorder::completed(bool with_running) const {
  const std::lock_guard lock(mutex_);
  for (uint64_t n = oldest(); n <= last_; ++n) {
    const Entry& entry = collectives_[n % kKept];
    const bool is_excused = with_running && entry.runs_on_gpu();
    if ((entry.is_pending() && !is_excused) || entry.state == State::kFailed) return n - 1;
  }
  return last_;
}

}  // namespace syncbn::dist::detail
