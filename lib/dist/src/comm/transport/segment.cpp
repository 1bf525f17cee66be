#include "transport/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <utility>

namespace syncbn::dist::detail::shm {
namespace {

constexpr char kName[] = "syncbn-exchange";

// Bytes of all ranks' inputs together, so that the memory depends little on the number of ranks.
constexpr size_t kAllInputs = size_t{4} << 20;
// Fits into a core's L2 cache, together with the part of the tensor that goes through it.
constexpr size_t kMaxInput = size_t{256} << 10;
constexpr size_t kMinInput = size_t{16} << 10;

std::array<char, 40> boot_id() {
  std::array<char, 40> id{};
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  file.read(id.data(), id.size() - 1);
  return id;
}

}  // namespace

Layout::Layout(int ranks)
    : input_bytes_(std::bit_floor(
          std::clamp(kAllInputs / static_cast<size_t>(ranks), kMinInput, kMaxInput))) {}

size_t Layout::input_at(size_t slot) const {
  constexpr size_t kPage = 4096;
  static_assert(sizeof(Header) <= kPage);
  return kPage + slot * (input_bytes() + result_bytes());
}

bool Segment::map(base::UniqueFd file, size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return false;
  memory_ = {static_cast<std::byte*>(memory), Unmap{bytes}};
  file_ = std::move(file);
  return true;
}

std::optional<Segment> Segment::make(const Layout& layout) {
  // Exceeding this limit would end the process by SIGXFSZ.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < layout.segment_bytes()) {
    return std::nullopt;
  }
  base::UniqueFd file(::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto bytes = static_cast<off_t>(layout.segment_bytes());
  // Access to memory that is not reserved, or to a truncated file, would raise SIGBUS.
  if (!file || ::posix_fallocate(file.get(), 0, bytes) != 0 ||
      ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return std::nullopt;
  }
  Segment segment;
  if (!segment.map(std::move(file), layout.segment_bytes())) return std::nullopt;
  auto* header = new (segment.memory_.get()) Header{};
  for (uint64_t& part : header->nonce) part = base::random_bits();
  for (const int cpu : base::allowed_cpus()) header->cpus.set(static_cast<size_t>(cpu));
  return segment;
}

Address Segment::address() const {
  return {.nonce = header().nonce, .boot_id = boot_id(), .pid = ::getpid(), .fd = file_.get()};
}

std::optional<Segment> Segment::open(const Address& address, const Layout& layout) {
  if (address.boot_id != boot_id()) return std::nullopt;
  const std::string path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  // In another container the PID may belong to an unrelated process, and opening one of its files,
  // such as a device, may have side effects.
  std::error_code ignored;
  const std::string link = std::filesystem::read_symlink(path, ignored).string();
  if (!link.starts_with(fmt::format("/memfd:{}", kName))) return std::nullopt;
  base::UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(layout.segment_bytes())) {
    return std::nullopt;
  }
  Segment segment;
  if (!segment.map(std::move(file), layout.segment_bytes())) return std::nullopt;
  segment.close_to_others();
  if (segment.header().nonce != address.nonce) return std::nullopt;
  return segment;
}

}  // namespace syncbn::dist::detail::shm
