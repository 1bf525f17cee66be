#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace fake_nccl {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

int open_segment(const std::string& name) {
  const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) fail("shm_open " + name);
  return file;
}

/// A lock on the byte of a rank. The kernel releases it when the rank's process ends.
struct flock lock_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Segment::Segment(std::string name, int rank) : name_(std::move(name)), file_(open_segment(name_)) {
  if (::ftruncate(file_, sizeof(SharedState)) != 0) fail("ftruncate " + name_);
  void* const memory =
      ::mmap(nullptr, sizeof(SharedState), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) fail("mmap " + name_);
  state_ = static_cast<SharedState*>(memory);
  struct flock lock = lock_of(rank);
  if (::fcntl(file_, F_SETLK, &lock) != 0) fail("lock " + name_);
}

Segment::~Segment() {
  ::munmap(state_, sizeof(SharedState));
  ::close(file_);
}

void Segment::remove_name() const {
  ::shm_unlink(name_.c_str());
}

bool Segment::is_dead(int rank) const {
  const Member& member = state_->members[static_cast<size_t>(rank)];
  // F_GETLK does not report a process's own locks.
  if (!member.has_joined || member.has_left || member.process == ::getpid()) return false;
  struct flock lock = lock_of(rank);
  return ::fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

}  // namespace fake_nccl
