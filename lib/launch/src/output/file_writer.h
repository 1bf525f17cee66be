#pragma once

#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace syncbn::launch {

/// Opens a file for appending. A FIFO needs a reader.
/// @param what "the log file". @throws base::UserError or base::UnavailableError naming the file.
base::UniqueFd open_to_append(const std::filesystem::path& path, const std::string& what);

/// A file that is open for appending, and what error messages call it.
struct OpenFile {
  std::shared_ptr<const base::UniqueFd> fd = {};
  std::string name = {};

  OpenFile() = default;
  OpenFile(const std::filesystem::path& path, const std::string& what)
      : fd(std::make_shared<base::UniqueFd>(open_to_append(path, what))),
        name(what + " " + path.string()) {}
};

/// Writes files one after the other in a thread, so that a file server that does not answer holds
/// up neither heartbeats nor signals. The thread starts with the first write, has all signals
/// blocked, and may outlive this object. Use the object from one thread, and not in a process that
/// fork() made: there is no such thread, and a lock may be held forever.
class FileWriter {
 public:
  /// Throws if it fails. May refer only to what it owns.
  using Write = std::function<void()>;
  /// Runs in handle() or finish(). @param what "cannot write FILE: REASON".
  using OnError = std::function<void(const std::string& what)>;

  /// In bytes. Writes above it wait as well, but then is_full().
  static constexpr size_t kMaxPending = size_t{4} << 20;

  FileWriter() = default;
  /// Gives up what is not written yet.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// @param file for error messages. @param bytes what the write keeps in memory.
  void add(std::string file, Write write, OnError on_error, size_t bytes = 0);
  void append(const OpenFile& file, std::string text, OnError on_error);

  /// Too much is pending: do not read what has to be written.
  bool is_full() const;
  /// While is_full(): readable when there may be room; then call handle().
  int fd() const;
  /// Reports the writes that have failed.
  void handle();
  /// Waits until all is written. Returns whether it was within `patience`.
  bool wait(std::chrono::milliseconds patience);
  /// Waits until all is written, and calls `meanwhile` again and again. If no write has ended for
  /// `patience`, gives up the rest, which has then failed. Returns whether all is written.
  bool finish(
      std::chrono::milliseconds patience, const std::function<void()>& meanwhile = [] {});
  /// The file that is being written; "" if none is.
  std::string current() const;

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;  ///< shared with the thread; null: none runs
};

}  // namespace syncbn::launch
