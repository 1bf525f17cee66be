#include "output/file_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/text.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"

namespace syncbn::launch {

base::UniqueFd open_to_append(const std::filesystem::path& path, const std::string& what) {
  // O_NONBLOCK: opening a pipe without a reader must not block the run.
  base::UniqueFd file(::open(
      path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
  if (!file) base::throw_file_error(fmt::format("cannot open {} {}", what, path.string()), errno);
  ::fcntl(file.get(), F_SETFL, ::fcntl(file.get(), F_GETFL) & ~O_NONBLOCK);
  return file;
}

struct FileWriter::Queue {
  struct Item {
    std::string file;
    FileWriter::Write write;
    FileWriter::OnError on_error;
    size_t bytes = 0;
    std::string what = {};  ///< why it has failed; "": it has not

    void run() {
      try {
        write();
      } catch (const std::exception& error) {
        what = error.what();
      }
    }
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;  ///< the thread is writing the first one
  std::vector<Item> failed;
  bool abandoned = false;
  std::atomic<size_t> bytes = 0;
  base::UniqueFd has_room{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};

  void write_all() {
    std::unique_lock lock(mutex);
    for (;; changed.notify_all()) {
      changed.wait(lock, [this] { return abandoned || !items.empty(); });
      if (abandoned) return;
      Item& item = items.front();
      lock.unlock();
      item.run();
      lock.lock();
      if (abandoned) return;
      if (bytes.fetch_sub(item.bytes) > kMaxPending) ::eventfd_write(has_room.get(), 1);
      if (!item.what.empty()) failed.push_back(std::move(item));
      items.pop_front();
    }
  }
};

FileWriter::~FileWriter() {
  if (!queue_) return;
  const std::lock_guard lock(queue_->mutex);
  queue_->abandoned = true;
  queue_->changed.notify_all();
}

void FileWriter::add(std::string file, Write write, OnError on_error, size_t bytes) {
  bytes += sizeof(Queue::Item);
  Queue::Item item{std::move(file), std::move(write), std::move(on_error), bytes};
  try {
    if (!queue_) {
      const auto queue = std::make_shared<Queue>();
      const base::SignalMask all_blocked;
      std::thread([queue] { queue->write_all(); }).detach();
      queue_ = queue;
    }
  } catch (const std::system_error&) {  // no room for a thread
    item.run();
    if (!item.what.empty()) item.on_error(item.what);
    return;
  }
  const std::lock_guard lock(queue_->mutex);
  queue_->bytes += bytes;
  queue_->items.push_back(std::move(item));
  queue_->changed.notify_all();
}

void FileWriter::append(const OpenFile& file, std::string text, OnError on_error) {
  const size_t bytes = text.size();
  auto write = [file, text = std::move(text)] {
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t written = ::write(file.fd->get(), rest.data(), rest.size());
      if (written < 0 && errno != EINTR) {
        throw base::UnavailableError(
            fmt::format("cannot write {}: {}", file.name, std::strerror(errno)));
      }
      rest.remove_prefix(written < 0 ? 0 : static_cast<size_t>(written));
    }
  };
  add(file.name, std::move(write), std::move(on_error), bytes);
}

bool FileWriter::is_full() const {
  return queue_ && queue_->bytes > kMaxPending;
}

int FileWriter::fd() const {
  return queue_ ? queue_->has_room.get() : -1;
}

void FileWriter::handle() {
  if (!queue_) return;
  eventfd_t ignored = 0;
  ::eventfd_read(queue_->has_room.get(), &ignored);
  std::unique_lock lock(queue_->mutex);
  const std::vector<Queue::Item> failed = std::exchange(queue_->failed, {});
  lock.unlock();
  for (const Queue::Item& one : failed) one.on_error(one.what);
}

bool FileWriter::wait(std::chrono::milliseconds patience) {
  if (!queue_) return true;
  std::unique_lock lock(queue_->mutex);
  return queue_->changed.wait_for(lock, patience, [this] { return queue_->items.empty(); });
}

std::string FileWriter::current() const {
  if (!queue_) return "";
  const std::lock_guard lock(queue_->mutex);
  return queue_->items.empty() ? "" : queue_->items.front().file;
}

bool FileWriter::finish(std::chrono::milliseconds patience,
                        const std::function<void()>& meanwhile) {
  constexpr std::chrono::milliseconds kPeriod{20};  // of `meanwhile`
  const auto queue = queue_;
  auto give_up = Clock::now() + patience;
  size_t left = SIZE_MAX;
  while (!wait(kPeriod) && Clock::now() < give_up) {
    meanwhile();
    const std::lock_guard lock(queue->mutex);
    const size_t before = std::exchange(left, queue->items.size());
    if (left < before) give_up = Clock::now() + patience;
  }
  handle();
  if (!queue) return true;
  const std::lock_guard lock(queue->mutex);
  if (queue->items.empty()) return true;
  queue->abandoned = true;
  queue_.reset();  // the next write gets another thread
  const std::string& stuck = queue->items.front().file;
  for (const Queue::Item& item : queue->items) {
    item.on_error(fmt::format("cannot write {}: no answer {}within {}", item.file,
                              item.file == stuck ? "" : fmt::format("for {} ", stuck),
                              base::format_seconds(patience)));
  }
  return false;
}

}  // namespace syncbn::launch
