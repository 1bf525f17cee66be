#include <syncbn/base/flight_record.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

namespace syncbn::base {
namespace {

template <size_t size>
void put(char (&to)[size], std::string_view text) {
  const std::string_view kept = utf8_prefix(text, size - 1);
  std::fill(std::copy(kept.begin(), kept.end(), to), to + size, '\0');
}

/// Stores a number so that a reader in another process that sees it also sees all earlier writes.
template <class Number>
void publish(Number& number, Number value) {
  std::atomic_ref(number).store(value, std::memory_order_release);
}

std::shared_ptr<FlightRecord> open_own(int rank, int world_size) {
  if (const char* const text = std::getenv(FlightRecord::kDescriptor)) {
    const auto number = parse_number<int>(text);
    ::unsetenv(FlightRecord::kDescriptor);
    if (!number) return {};
    auto record = FlightRecord::make(*number, rank, world_size);
    // Without a record, the number is stale and refers to another file, which must stay open.
    if (record) ::close(*number);
    return record;
  }
  const auto folder = env("SYNCBN_FLIGHT_FOLDER");
  if (!folder) return {};
  const std::string path = fmt::format("{}/rank-{}.flight", *folder, rank);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  // Allocate the blocks now: on a full disk, a write to mapped memory would kill this process.
  if (fd && ::posix_fallocate(fd.get(), 0, sizeof(FlightLayout)) != 0) return {};
  return FlightRecord::prepare(fd.get()) ? FlightRecord::make(fd.get(), rank, world_size) : nullptr;
}

struct Own {
  std::mutex mutex;
  pid_t pid = 0;  ///< a forked child has the memory of its parent, but is another process
  std::shared_ptr<FlightRecord> record;

  static Own& instance() {
    static auto* const own = new Own;  // threads may outlive static destructors
    return *own;
  }
};

}  // namespace

std::shared_ptr<FlightRecord> FlightRecord::of_process(int rank, int world_size) {
  Own& own = Own::instance();
  const std::lock_guard lock(own.mutex);
  if (own.pid != ::getpid()) {
    own.pid = ::getpid();
    own.record = open_own(rank, world_size);
  }
  return own.record;
}

std::shared_ptr<FlightRecord> FlightRecord::current() {
  Own& own = Own::instance();
  const std::lock_guard lock(own.mutex);
  return own.pid == ::getpid() ? own.record : nullptr;
}

bool FlightRecord::is_taken(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  return ::fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool FlightRecord::prepare(int fd) {
  FlightLayout::Header header{};
  header.magic = FlightLayout::kMagic;
  header.version = FlightLayout::kVersion;
  return ::ftruncate(fd, sizeof(FlightLayout)) == 0 &&
         ::pwrite(fd, &header, sizeof(header), 0) == static_cast<ssize_t>(sizeof(header));
}

std::shared_ptr<FlightRecord> FlightRecord::make(int fd, int rank, int world_size) {
  struct stat what {};
  if (::fstat(fd, &what) != 0 || what.st_size != sizeof(FlightLayout)) return {};
  // The lock belongs to a file description of this process's own. It lasts until this process and
  // all that it has forked have ended, in whichever PID namespace.
  UniqueFd own(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock {};
  lock.l_type = F_WRLCK;
  if (!own || ::fcntl(own.get(), F_OFD_SETLK, &lock) != 0) return {};
  void* const memory =
      ::mmap(nullptr, sizeof(FlightLayout), PROT_READ | PROT_WRITE, MAP_SHARED, own.get(), 0);
  if (memory == MAP_FAILED) return {};
  auto* const layout = static_cast<FlightLayout*>(memory);
  FlightLayout::Header& header = layout->header;
  if (header.magic != FlightLayout::kMagic || header.version != FlightLayout::kVersion) {
    ::munmap(memory, sizeof(FlightLayout));
    return {};
  }
  if (header.pid != 0) {  // the record of a process that has ended
    std::memset(memory, 0, sizeof(FlightLayout));
    header.magic = FlightLayout::kMagic;
    header.version = FlightLayout::kVersion;
  }
  header.rank = rank;
  header.world_size = world_size;
  const uint64_t now = monotonic_ns();
  header.unix_ns = unix_ns() - static_cast<int64_t>(now);
  header.own_since = now;
  put(header.host, hostname());
  publish(header.pid, static_cast<int32_t>(::getpid()));
  return std::shared_ptr<FlightRecord>(new FlightRecord(std::move(own), layout));
}

FlightRecord::~FlightRecord() {
  ::munmap(layout_, sizeof(FlightLayout));
}

size_t FlightRecord::add_group(const std::string& name, const std::vector<int>& ranks) {
  const std::string line = fmt::format("{} {}\n", fmt::join(ranks, ","), printable(name));
  const std::lock_guard lock(mutex_);
  FlightLayout::Header& header = layout_->header;
  // After the first group that does not fit, no group gets a line, because a group's number is the
  // index of its line.
  has_all_groups_ = has_all_groups_ && groups_ < FlightLayout::kGroups &&
                    header.group_bytes + line.size() <= FlightLayout::kGroupBytes;
  if (has_all_groups_) {
    line.copy(layout_->groups + header.group_bytes, line.size());
    publish(header.group_bytes, header.group_bytes + static_cast<uint32_t>(line.size()));
  }
  return groups_++;
}

void FlightRecord::set_gpu(const std::string& address) {
  const std::lock_guard lock(mutex_);
  put(layout_->header.gpu, address);
}

std::chrono::nanoseconds FlightRecord::own_time() {
  const std::lock_guard lock(mutex_);
  return std::chrono::nanoseconds(layout_->header.own_until(monotonic_ns()));
}

/// Null for sends and recvs, and for groups without a line.
uint64_t* FlightRecord::last_collective(const FlightLayout::Call& entry) const {
  const bool has_line = entry.peer < 0 && entry.group < FlightLayout::kGroups;
  return has_line ? &layout_->last_collectives[entry.group] : nullptr;
}

uint64_t FlightRecord::begin(const Call& call) {
  const std::lock_guard lock(mutex_);
  FlightLayout::Header& header = layout_->header;
  const uint64_t number = header.started + 1;
  FlightLayout::Call& entry = layout_->calls[number % FlightLayout::kCalls];
  publish(entry.number, uint64_t{0});  // readers skip the entry until it is complete
  std::atomic_thread_fence(std::memory_order_release);
  entry.sequence = call.sequence;
  entry.begin = monotonic_ns();
  entry.end = 0;
  entry.awaited = 0;
  entry.dimensions = static_cast<uint8_t>(std::min(call.dimensions, std::size(entry.sizes)));
  std::copy_n(call.sizes, entry.dimensions, entry.sizes);
  entry.peer = call.peer;
  entry.group =
      static_cast<uint16_t>(std::min<size_t>(call.group, std::numeric_limits<uint16_t>::max()));
  entry.state = FlightLayout::kPending;
  put(entry.kind, call.kind);
  put(entry.dtype, call.dtype);
  put(entry.name, call.name);
  publish(entry.number, number);
  if (uint64_t* const last = last_collective(entry)) publish(*last, call.sequence);
  publish(header.started, number);
  return number;
}

void FlightRecord::await(uint64_t number) {
  const std::lock_guard lock(mutex_);
  FlightLayout::Call& entry = layout_->calls[number % FlightLayout::kCalls];
  if (entry.number == number) publish(entry.awaited, monotonic_ns());
  FlightLayout::Header& header = layout_->header;
  if (awaited_++ > 0) return;
  header.own_ns += monotonic_ns() - header.own_since;
  publish(header.own_since, uint64_t{0});
}

void FlightRecord::end(uint64_t number, FlightLayout::State state, bool was_awaited,
                       std::chrono::nanoseconds on_gpu) {
  const std::lock_guard lock(mutex_);
  const uint64_t now = monotonic_ns();
  FlightLayout::Call& entry = layout_->calls[number % FlightLayout::kCalls];
  if (entry.number == number) {  // otherwise a later call has overwritten the entry
    entry.state = state;
    publish(entry.end, now);
  }
  FlightLayout::Header& header = layout_->header;
  header.own_ns -= static_cast<uint64_t>(on_gpu.count());
  if (was_awaited && --awaited_ == 0) publish(header.own_since, now);
  publish(header.ended, header.ended + 1);
}

void FlightRecord::remove(uint64_t number) {
  const std::lock_guard lock(mutex_);
  FlightLayout::Call& entry = layout_->calls[number % FlightLayout::kCalls];
  if (entry.number == number) {
    publish(entry.number, uint64_t{0});
    if (uint64_t* const last = last_collective(entry)) publish(*last, entry.sequence - 1);
  }
  publish(layout_->header.ended, layout_->header.ended + 1);
}

}  // namespace syncbn::base
