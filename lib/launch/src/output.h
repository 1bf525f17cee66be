#pragma once

#include <syncbn/base/unique_fd.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "standard_stream.h"

namespace syncbn::launch {

enum class Stream { kOut, kErr };

/// Cuts bytes into lines. A line longer than kLongest is cut: memory stays bounded.
class LineSplitter {
 public:
  static constexpr size_t kLongest = 1 << 20;
  using Sink = std::function<void(std::string_view line)>;  ///< without its newline

  void feed(std::string_view bytes, const Sink& sink);
  /// The last line, when it had no newline.
  void finish(const Sink& sink);

 private:
  std::string partial_;
};

struct WorkerOutput {
  int rank = 0;  ///< the global one, which chooses the colour
  std::string prefix =
      {};             ///< before each line, with ${time} replaced; empty: bytes pass as they are
  bool shown = true;  ///< here, and not only in log files
};

struct OutputOptions {
  bool out_is_terminal = false;
  bool err_is_terminal = false;
  bool colour = false;  ///< on terminals
  /// Lines with one of these texts are copied to filtered_stdout.log and filtered_stderr.log.
  std::vector<std::string> out_filters = {};
  std::vector<std::string> err_filters = {};
};

/// Everything that the launcher prints: the workers' lines, its own messages, the progress bar
/// below them. Lines of different workers never mix. Nothing here waits for the reader.
class Output {
 public:
  static constexpr size_t kTailLines = 20;
  static constexpr size_t kMostPending = 1 << 20;

  explicit Output(OutputOptions options);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Begins anew with these workers. `folder` is where filtered lines are copied to.
  void begin_attempt(std::vector<WorkerOutput> workers, const std::filesystem::path& folder);

  /// Copies what a worker writes to a file as well.
  void log_to(size_t worker, Stream stream, base::UniqueFd file);

  /// What a worker wrote.
  void write(size_t worker, Stream stream, std::string_view bytes);
  /// The end of a worker's stream: prints a last line that had no newline.
  void finish(size_t worker, Stream stream);

  /// A message of the launcher itself, of one or more lines.
  void say(std::string_view message);

  /// The bar to show under the lines from now on; empty removes it. Nothing without a terminal.
  void set_bar(std::string bar);

  /// Writes what our reader would not take before, as far as it goes.
  void flush();
  /// What to poll for POLLOUT before the next flush(); empty: all is written.
  std::vector<int> waits_for() const;
  /// So much waits for our reader that the workers should wait, too.
  bool is_full(Stream stream) const;
  /// Why lines of the workers were lost, if they were.
  std::optional<std::string> error() const;

  /// The last lines of a worker's stderr.
  std::vector<std::string> tail(size_t worker) const;
  /// Whether that tail is the last thing that was printed, so that a report need not repeat it.
  bool tail_is_last(size_t worker) const;

 private:
  struct TailLine {
    uint64_t number;  ///< of all lines printed
    std::string text;
  };
  struct WorkerStream {
    LineSplitter lines;
    base::UniqueFd log;
  };
  struct Worker {
    WorkerOutput options;
    WorkerStream out;
    WorkerStream err;
    std::deque<TailLine> tail;

    WorkerStream& of(Stream stream) { return stream == Stream::kOut ? out : err; }
  };

  std::string prefix_of(size_t worker, Stream stream) const;
  LineSplitter::Sink sink(size_t worker, Stream stream, std::string& text);
  void filter(Stream stream, const std::string& prefix, std::string_view line);
  const StandardStream& stream_of(Stream stream) const;
  void print(Stream stream, std::string_view text);
  void erase_bar();
  void draw_bar();

  OutputOptions options_;
  bool one_terminal_;  ///< one queue then, or lines would change places
  StandardStream out_;
  StandardStream err_;
  std::vector<Worker> workers_;
  base::UniqueFd filtered_out_;
  base::UniqueFd filtered_err_;
  uint64_t lines_ = 0;
  std::string bar_;
  bool bar_is_drawn_ = false;
  bool at_line_start_ = true;
};

}  // namespace syncbn::launch
