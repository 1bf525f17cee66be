#include "monitor/flight_recorder.h"

#include <c10/util/accumulate.h>
#include <c10/util/hash.h>
#include <fmt/format.h>

#include <algorithm>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "monitor/plain_message.h"

namespace syncbn::dist::detail {
namespace {

const char* name_of_op(int reduce_op) {
  constexpr std::array kNames{"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                              "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  const auto index = static_cast<size_t>(reduce_op);
  return index < kNames.size() ? kNames[index] : "another operation";
}

}  // namespace

uint16_t Call::fingerprint() const {
  size_t hash = c10::get_hash(static_cast<int>(type), static_cast<int>(dtype), root, reduce_op);
  for (const int64_t size : sizes) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  hash = c10::hash_combine(hash, has_sizes ? sizes.size() : SIZE_MAX);
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
  if (reduce_op > 0) text += fmt::format(" by {}", name_of_op(reduce_op));
  if (root >= 0) text += fmt::format(" with root {}", root);
  return text;
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

FlightRecorder::FlightRecorder(std::string group, std::vector<int> ranks,
                               std::function<void()> abort)
    : group_(std::move(group)), ranks_(std::move(ranks)), abort_(std::move(abort)) {}

bool FlightRecorder::has_member(int rank) const {
  return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end();
}

void FlightRecorder::abort(const Call& call) {
  set_failed(call);
  abort_();
}

void FlightRecorder::set_failed(const Call& call) {
  const std::lock_guard lock(mutex_);
  if (!failed_ || failed_->sequence == 0) failed_ = call;
}

std::optional<Call> FlightRecorder::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void FlightRecorder::begin(const Call& call, std::function<bool()> is_done, Timeout timeout) {
  const std::lock_guard lock(mutex_);
  Entry entry{call, Clock::now(), std::move(is_done), timeout};
  if (call.is_collective()) {
    last_ = call.sequence;
    collectives_[call.sequence % kKept] = std::move(entry);
    return;
  }
  transfers_.remove_if([&call](const Entry& old) {
    return old.call.sequence == call.sequence || !old.is_pending();
  });
  transfers_.push_back(std::move(entry));
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

void FlightRecorder::succeed(const Call& call) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = entry_of(call);
  if (entry == nullptr || !entry->is_pending()) return;  // it may have failed meanwhile
  entry->state = State::kSucceeded;
  entry->is_done = nullptr;
}

void FlightRecorder::fail(const Call& call) {
  set_failed(call);
  const std::lock_guard lock(mutex_);
  if (Entry* entry = entry_of(call)) entry->state = State::kFailed;
}

void FlightRecorder::refuse(const Call& call) {
  const std::lock_guard lock(mutex_);
  if (!call.is_collective()) {
    transfers_.remove_if(
        [&call](const Entry& entry) { return entry.call.sequence == call.sequence; });
  } else if (Entry* const entry = entry_of(call)) {
    // Its slot is also that of call `sequence - kKept`, which has ended long ago.
    *entry = {};
    entry->state = State::kSucceeded;
    last_ = call.sequence - 1;
  }
}

std::vector<FlightRecorder::Entry> FlightRecorder::pending_entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> result;
  const auto add = [&result](const Entry& entry) {
    if (entry.is_pending()) result.push_back(entry);
  };
  for (uint64_t n = oldest(); n <= last_; ++n) add(collectives_[n % kKept]);
  for (const Entry& entry : transfers_) add(entry);
  return result;
}

void FlightRecorder::update() {
  for (const Entry& entry : pending_entries()) {
    if (!entry.is_done) continue;
    try {
      if (entry.is_done()) succeed(entry.call);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      if (!transport_error_) transport_error_ = {plain_message(error), entry.call, Clock::now()};
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
  for (const Entry& entry : pending_entries()) {
    result.push_back({entry.call, entry.since, entry.timeout});
  }
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
    const bool runs_by_itself = with_running && entry.timeout.has_value();
    if ((entry.is_pending() && !runs_by_itself) || entry.state == State::kFailed) return n - 1;
  }
  return last_;
}

}  // namespace syncbn::dist::detail
