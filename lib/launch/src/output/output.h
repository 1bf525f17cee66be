#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "output/standard_stream.h"

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
  /// What has come of the next line.
  std::string_view partial() const { return partial_; }

 private:
  std::string partial_;
};

struct WorkerOutput {
  int rank = 0;             ///< the global one, which chooses the colour
  bool whole_lines = true;  ///< as others write here, too; false: bytes pass as they are
  /// Before each whole line, with ${time} replaced; if empty, a line that pauses is shown as far as
  /// it has come.
  std::string prefix = {};
  bool shown = true;  ///< here, and not only in log files
};

struct OutputOptions {
  struct Destination {
    bool is_terminal = false;
    bool takes_colours = false;
    /// Lines with one of these texts are copied to a file.
    std::vector<std::string> filters = {};
  };
  Destination out = {};
  Destination err = {};
};

/// Which of our standard streams are terminals whose user wants colours.
Streams terminal_colours();

/// Everything that the launcher prints: the workers' lines, its own messages, the progress bar
/// below them. Lines of different workers never mix. Nothing here waits for the reader.
class Output {
 public:
  static constexpr size_t kTailLines = 20;
  static constexpr size_t kTailLineLength = 2000;  ///< bytes; what is longer is cut
  static constexpr size_t kMostPending = 1 << 20;

  explicit Output(OutputOptions options);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Begins anew with these workers.
  void begin_attempt(std::vector<WorkerOutput> workers);

  /// Copies what a worker writes to a file as well.
  void log_to(size_t worker, Stream stream, const std::filesystem::path& file);
  /// Copies lines that the options' filters choose to a file as well.
  void copy_filtered(Stream stream, const std::filesystem::path& file);

  /// What a worker wrote.
  void write(size_t worker, Stream stream, std::string_view bytes);
  /// The end of a worker's stream: prints a last line that had no newline.
  void finish(size_t worker, Stream stream);

  /// A message of the launcher itself, of one or more lines.
  void say(std::string_view message);

  /// The bar to show under the lines from now on; empty removes it. Nothing without a terminal.
  void set_bar(std::string bar);
  /// Shows the lines that workers have begun and not ended: progress that they write over and over
  /// after a carriage return, and prompts. With prefixes above the bar, and nothing without a
  /// terminal.
  void show_partial_lines();
  /// Takes those lines and the bar away.
  void clear_live();
  /// When show_partial_lines() has something new to show; empty: not before the next write().
  std::optional<std::chrono::steady_clock::time_point> due() const { return due_; }

  /// Writes what our reader would not take before, as far as it goes.
  void flush();
  /// What to poll for POLLOUT before the next flush(); empty: all is written.
  std::vector<int> waits_for() const;
  /// So much waits for our reader that the workers should wait, too.
  bool is_full(Stream stream);
  /// Why lines of the workers were lost here or in a log file, if they were.
  std::optional<std::string> error() const;

  /// The last lines of a worker's stderr.
  std::vector<std::string> tail(size_t worker) const;
  /// Whether that tail is the last thing that was shown, so that a report need not repeat it.
  bool tail_is_last(size_t worker) const;

 private:
  struct TailLine {
    uint64_t number;  ///< of all lines shown
    std::string text;
  };
  struct LogFile {
    base::UniqueFd fd;
    std::filesystem::path path;
  };
  struct WorkerStream {
    LineSplitter lines;
    LogFile log;
    // Of the line that has begun:
    std::string live;   ///< what is shown of it above the bar
    size_t passed = 0;  ///< so many bytes have been printed
  };
  struct Worker {
    WorkerOutput options;
    WorkerStream out;
    WorkerStream err;
    std::deque<TailLine> tail;

    WorkerStream& of(Stream stream) { return stream == Stream::kOut ? out : err; }
  };
  /// Our own stdout or stderr.
  struct Destination {
    OutputOptions::Destination options;
    StandardStream stream;
    LogFile filtered;
  };

  Destination& destination(Stream stream) { return stream == Stream::kOut ? out_ : err_; }
  /// Where its lines wait for the reader.
  StandardStream& queue(Stream stream);
  std::string prefix_of(size_t worker, Stream stream);
  LineSplitter::Sink sink(size_t worker, Stream stream, std::string& text);
  bool needs_lines(size_t worker, Stream stream);
  void filter(Stream stream, const std::string& prefix, std::string_view line);
  void write_to_log(const LogFile& log, std::string_view text);
  void print(Stream stream, std::string_view text);
  bool is_live(const Worker& worker, Stream stream);
  static bool passes_pieces(const WorkerOutput& options);
  void pass_piece(WorkerStream& from, size_t end, std::string& text);
  std::string live_line(size_t worker, const std::string& live) const;
  std::vector<std::string> live_lines();
  void erase_live();
  void draw_live();

  Destination out_;
  Destination err_;
  /// Both lead to the same terminal, pipe or file: one queue, or lines would be torn.
  bool same_destination_;
  std::vector<Worker> workers_;
  std::string log_error_;  ///< the first
  uint64_t lines_ = 0;
  std::string bar_;
  size_t drawn_lines_ = 0;  ///< below the cursor's first
  std::optional<std::chrono::steady_clock::time_point> due_;
  bool at_line_start_ = true;
};

}  // namespace syncbn::launch
