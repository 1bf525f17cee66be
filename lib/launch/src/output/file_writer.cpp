#include "output/file_writer.h"

#include <fmt/format.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/text.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace syncbn::launch {
namespace {

struct Item {
  std::string file;
  FileWriter::Write write;
  FileWriter::OnError on_error;
  size_t bytes = 0;
};

struct Failure {
  FileWriter::OnError on_error;
  std::string what;
};

// Why the write failed; "": it has not.
std::string run(const FileWriter::Write& write) {
  try {
    write();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

struct FileWriter::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;  ///< the first one is being written
  size_t bytes = 0;
  std::vector<Failure> failures;
  bool abandoned = false;
  base::UniqueFd has_room{::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)};  ///< readable if it has

  void write_all() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return abandoned || !items.empty(); });
      if (abandoned) return;
      const Item& item = items.front();
      lock.unlock();
      const std::string what = run(item.write);
      lock.lock();
      if (abandoned) return;
      if (!what.empty()) failures.push_back({item.on_error, what});
      set_bytes(bytes - item.bytes);
      items.pop_front();
      changed.notify_all();
    }
  }

  void set_bytes(size_t count) {
    const bool was_full = is_full();
    bytes = count;
    eventfd_t ignored = 0;
    if (is_full() && !was_full) ::eventfd_read(has_room.get(), &ignored);
    if (was_full && !is_full()) ::eventfd_write(has_room.get(), 1);
  }
  bool is_full() const { return bytes > kMaxPending; }
};

FileWriter::~FileWriter() {
  if (!queue_) return;
  const std::lock_guard lock(queue_->mutex);
  queue_->abandoned = true;
  queue_->changed.notify_all();
}

void FileWriter::add(std::string file, Write write, OnError on_error, size_t bytes) {
  if (!queue_) {
    auto queue = std::make_shared<Queue>();
    try {
      const base::SignalMask none;
      std::thread([queue] { queue->write_all(); }).detach();
    } catch (const std::system_error&) {  // no room for a thread
      if (const std::string what = run(write); !what.empty()) on_error(what);
      return;
    }
    queue_ = std::move(queue);
  }
  const std::lock_guard lock(queue_->mutex);
  queue_->items.push_back({std::move(file), std::move(write), std::move(on_error), bytes});
  queue_->set_bytes(queue_->bytes + bytes);
  queue_->changed.notify_all();
}

void FileWriter::append(const OpenFile& file, std::string text, OnError on_error) {
  const size_t bytes = text.size();
  const auto write = [file, text = std::move(text)] {
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t written = ::write(file.fd->get(), rest.data(), rest.size());
      if (written >= 0) {
        rest.remove_prefix(static_cast<size_t>(written));
      } else if (errno != EINTR) {
        throw std::runtime_error(
            fmt::format("cannot write {}: {}", file.name, std::strerror(errno)));
      }
    }
  };
  add(file.name, write, std::move(on_error), bytes);
}

bool FileWriter::is_full() const {
  if (!queue_) return false;
  const std::lock_guard lock(queue_->mutex);
  return queue_->is_full();
}

int FileWriter::fd() const {
  return queue_ ? queue_->has_room.get() : -1;
}

void FileWriter::handle() {
  if (!queue_) return;
  std::vector<Failure> failures;
  {
    const std::lock_guard lock(queue_->mutex);
    failures.swap(queue_->failures);
  }
  for (const Failure& one : failures) one.on_error(one.what);
}

void FileWriter::finish(std::chrono::milliseconds patience) {
  if (!queue_) return;
  const auto queue = queue_;
  std::unique_lock lock(queue->mutex);
  const auto& items = queue->items;
  queue->abandoned = !queue->changed.wait_for(lock, patience, [&] { return items.empty(); });
  if (queue->abandoned) queue_.reset();  // the next write gets another thread
  std::vector<Failure> failures = std::move(queue->failures);
  for (const Item& item : items) {
    const std::string& stuck = items.front().file;
    failures.push_back(
        {item.on_error, fmt::format("cannot write {}: no answer {}within {}", item.file,
                                    item.file == stuck ? "" : fmt::format("for {} ", stuck),
                                    base::format_seconds(patience))});
  }
  lock.unlock();
  for (const Failure& one : failures) one.on_error(one.what);
}

}  // namespace syncbn::launch
