#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/signals.h"
#include "output/file_writer.h"
#include "output/standard_stream.h"

namespace syncbn::launch {

enum class Stream { kOut, kErr };

/// Splits bytes into lines. To bound memory, a line longer than `longest` bytes is cut.
class LineSplitter {
 public:
  static constexpr size_t kLongest = 1 << 20;
  using Sink = std::function<void(std::string_view line)>;  ///< without its newline

  explicit LineSplitter(size_t longest = kLongest) : longest_(longest) {}

  void feed(std::string_view bytes, const Sink& sink);
  /// Passes on a last line that has no newline.
  void finish(const Sink& sink);
  /// The bytes after the last newline.
  std::string_view partial() const { return partial_; }
  /// Passes on the partial line but for its last `rest` bytes.
  void cut(size_t rest, const Sink& sink);

 private:
  size_t longest_;
  std::string partial_;
};

struct WorkerOutput {
  int rank = 0;             ///< global; chooses the colour
  bool whole_lines = true;  ///< false: bytes pass unchanged, for a worker that writes alone
  /// Printed before each whole line, with ${time} replaced. If empty, the beginning of a line that
  /// is not finished yet is printed as well.
  std::string prefix = {};
  bool shown = true;  ///< false: only in log files
};

/// --prefix for one worker, with ${time} left in it.
std::string line_prefix(const LaunchOptions& options, int rank, int local_rank);

struct OutputOptions {
  struct Destination {
    bool is_terminal = false;
    bool takes_colours = false;
    /// Lines with one of these texts are copied to a file.
    std::vector<std::string> filters = {};
  };
  Destination out = {};
  Destination err = {};
  bool speaks_for_job = true;  ///< false: another node of a head prints messages about the job
};

/// Which of our standard streams are terminals whose user wants colours.
Streams terminal_colours();

/// Prints everything that the launcher shows: the workers' lines, its own messages, and the
/// progress bar below them. Lines of different workers never mix. No function waits for the reader.
class Output {
 public:
  static constexpr size_t kTailLines = 20;
  static constexpr size_t kTailLineLength = 2000;  ///< bytes; the rest of a line is cut
  static constexpr size_t kMaxPending = 1 << 20;   ///< bytes
  /// Time for a file server to answer at the end of a run.
  static constexpr std::chrono::seconds kFilePatience{10};

  explicit Output(OutputOptions options);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Replaces the workers and drops the state of the previous ones.
  void begin_attempt(std::vector<WorkerOutput> workers);

  /// Also writes what a worker writes to `file`.
  void log_to(size_t worker, Stream stream, const std::filesystem::path& file);
  /// Also writes lines that match the stream's filters, if there are any, to `file`.
  void copy_filtered(Stream stream, const std::filesystem::path& file);

  void write(size_t worker, Stream stream, std::string_view bytes);
  /// The end of a worker's stream: prints a last line that has no newline.
  void finish(size_t worker, Stream stream);

  /// Prints a message of the launcher, of one or more lines, to stderr.
  void say(std::string_view message);
  /// Prints "syncbn-launch: " and the message, as say() does.
  template <class... Args>
  void announce(fmt::format_string<Args...> format, Args&&... args) {
    say("syncbn-launch: " + fmt::format(format, std::forward<Args>(args)...));
  }

  /// Prints a message about the whole job, unless another node of a head prints it.
  template <class... Args>
  void announce_for_job(fmt::format_string<Args...> format, Args&&... args) {
    if (speaks_for_job_) announce(format, std::forward<Args>(args)...);
  }

  /// Shows a bar below the lines until the next call; empty removes it. Does nothing unless stderr
  /// is a terminal.
  void set_bar(std::string bar);
  /// Shows the lines that workers have begun and not ended: prompts, and progress that is
  /// overwritten after a carriage return. Lines with a prefix are shown above the bar, and only on
  /// a terminal.
  void show_partial_lines();
  /// Erases those lines and the bar.
  void clear_live();
  /// When show_partial_lines() has something new to show; empty: not before the next write().
  std::optional<Clock::time_point> due() const { return due_; }

  /// Writes as much of the pending text as our reader takes, and reports files that could not be
  /// written.
  void flush();
  /// Adds what to poll before the next flush(); nothing if all text has been read.
  void add_to(std::vector<pollfd>& polls) const;
  /// Too much text is pending: do not read from the workers, so that they wait as well.
  bool is_full(Stream stream);
  /// Our reader has stopped (`less`, Ctrl-S).
  bool reader_waits();
  /// For all files of this launcher. The errors of log files are in error().
  FileWriter& files() { return files_; }
  /// Warns if a write fails.
  void write_file(const std::string& file, FileWriter::Write write);
  /// Waits until all files are written. A file that does not answer is given up after
  /// kFilePatience, and a second one after a second.
  void finish_files();
  /// Why lines of the workers were lost, here or in a log file; empty if none were.
  std::optional<std::string> error() const;

  std::vector<std::string> tail(size_t worker) const {
    return {workers_[worker].tail.begin(), workers_[worker].tail.end()};
  }
  /// Whether the tail is the last thing that was printed, so that a report need not repeat it.
  bool tail_is_last(size_t worker) const;

 private:
  struct WorkerStream {
    LineSplitter lines;
    OpenFile log;
    std::string live;   ///< the part of an unfinished line that is shown above the bar
    size_t passed = 0;  ///< how many bytes of that line have been printed
  };
  struct Worker {
    WorkerOutput options;
    WorkerStream out;
    WorkerStream err;
    std::deque<std::string> tail;

    WorkerStream& of(Stream stream) { return stream == Stream::kOut ? out : err; }
  };
  struct Destination {
    OutputOptions::Destination options;
    StandardStream stream;
    OpenFile filtered;
  };

  Destination& destination(Stream stream) { return stream == Stream::kOut ? out_ : err_; }
  StandardStream& queue(Stream stream);
  std::string prefix_of(size_t worker, Stream stream);
  LineSplitter::Sink sink(size_t worker, Stream stream, std::string& text);
  void write_to_log(const OpenFile& log, std::string text);
  void print(Stream stream, std::string_view text);
  bool is_live(const Worker& worker, Stream stream);
  static bool passes_pieces(const WorkerOutput& options);
  static void pass_piece(WorkerStream& from, size_t end, std::string& text);
  std::vector<std::string> live_lines();
  void erase_live();
  void draw_live();

  Destination out_;
  Destination err_;
  /// Both are the same terminal, pipe or file: they share err_'s queue, so that no line is torn.
  bool same_destination_;
  bool speaks_for_job_;
  std::vector<Worker> workers_;
  FileWriter files_;
  std::chrono::milliseconds file_patience_ = kFilePatience;
  std::optional<Clock::time_point> files_full_since_;
  std::string log_error_;  ///< the first
  size_t last_ = 0;        ///< the worker of the last line shown
  size_t run_ = 0;         ///< its lines on stderr since another line was shown
  std::string bar_;
  size_t drawn_lines_ = 0;  ///< of live lines and the bar
  std::optional<Clock::time_point> due_;
  bool at_line_start_ = true;
};

/// The launcher's ends of the pipes to which a worker, or the launcher of a node, writes.
struct OutputPipes {
  using Sink = std::function<void(Stream stream, std::string_view bytes)>;

  base::UniqueFd out;
  base::UniqueFd err;

  /// Adds what to poll before read(): the pipes whose text `output` has room for.
  void add_to(std::vector<pollfd>& polls, Output& output) const;
  /// Reads once from each of them, so that a process that writes much does not delay the others.
  void read(Output& output, const Sink& sink);
  /// Reads what is left, with an upper bound: a grandchild that holds a pipe may never stop
  /// writing.
  void drain(const Sink& sink);

 private:
  bool read_stream(Stream stream, const Sink& sink);
};

/// At the end of a run, waits until our reader has taken all output. Returns the launcher's exit
/// code: the run's own, that of a signal that ends the wait, or 75 if output was lost.
/// @param interrupted a signal or another node ended the run: a reader that has stopped (`less`, a
///   stopped terminal) gets one second.
int wait_for_reader(Output& output, Signals& signals, int exit_code, bool interrupted);

}  // namespace syncbn::launch
