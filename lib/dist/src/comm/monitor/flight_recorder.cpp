#include "monitor/flight_recorder.h"

#include <c10/util/accumulate.h>
#include <c10/util/hash.h>
#include <fmt/format.h>

#include <algorithm>

#include <torch/csrc/distributed/c10d/Types.hpp>

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

bool FlightRecorder::Entry::is_pending() {
  if (state != State::kPending) return false;
  if (!is_done || !is_done()) return true;
  state = State::kSucceeded;  // unless fail() says otherwise
  is_done = nullptr;
  return false;
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
  transfers_.remove_if(
      [&call](Entry& old) { return old.call.sequence == call.sequence || !old.is_pending(); });
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
  if (Entry* entry = entry_of(call)) entry->state = State::kSucceeded;
}

void FlightRecorder::fail(const Call& call) {
  set_failed(call);
  refuse(call);
}

void FlightRecorder::refuse(const Call& call) {
  const std::lock_guard lock(mutex_);
  if (Entry* entry = entry_of(call)) entry->state = State::kFailed;
}

std::vector<FlightRecorder::Pending> FlightRecorder::pending() {
  const std::lock_guard lock(mutex_);
  std::vector<Pending> result;
  const auto add = [&result](Entry& entry) {
    if (entry.is_pending()) result.push_back({entry.call, entry.since, entry.timeout});
  };
  for (uint64_t n = oldest(); n <= last_; ++n) add(collectives_[n % kKept]);
  for (Entry& entry : transfers_) add(entry);
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

uint64_t FlightRecorder::completed() {
  const std::lock_guard lock(mutex_);
  for (uint64_t n = oldest(); n <= last_; ++n) {
    Entry& entry = collectives_[n % kKept];
    if (entry.is_pending() || entry.state == State::kFailed) return n - 1;
  }
  return last_;
}

}  // namespace syncbn::dist::detail
