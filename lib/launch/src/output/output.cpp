#include "output/output.h"

#include <fmt/chrono.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "common/descriptors.h"

namespace syncbn::launch {
namespace {

using base::truncated;

std::string coloured(int rank, const std::string& text) {
  // Readable on dark and light backgrounds; red is for errors.
  constexpr std::array kColours{36, 33, 35, 32, 34, 96, 95, 92};
  return fmt::format("\x1b[{}m{}\x1b[0m", kColours[static_cast<size_t>(rank) % kColours.size()],
                     text);
}

std::string time_of_day() {
  const std::time_t now = std::time(nullptr);
  return fmt::format("{:%H:%M:%S}", *std::localtime(&now));
}

constexpr std::chrono::milliseconds kLivePeriod{100};
constexpr size_t kMaxLive = 16;  // lines

// What a terminal finally shows of a line that is overwritten after carriage returns.
std::string_view last_part(std::string_view line) {
  const size_t end = line.find_last_not_of('\r');
  line = line.substr(0, end == std::string_view::npos ? 0 : end + 1);
  const size_t start = line.rfind('\r');
  return start == std::string_view::npos ? line : line.substr(start + 1);
}

// Removes escape sequences, which move the cursor or change colours.
std::string visible(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 2) == "\x1b[") {
      for (i += 2; i < text.size() && (text[i] < '@' || text[i] > '~'); ++i) {
      }
    } else {
      result += text[i] == '\t' ? ' ' : text[i];
    }
  }
  return base::printable(result);
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

bool is_same_destination() {
  struct stat out {};
  struct stat err {};
  return ::fstat(STDOUT_FILENO, &out) == 0 && ::fstat(STDERR_FILENO, &err) == 0 &&
         out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

}  // namespace

Streams terminal_colours() {
  const bool wanted = !base::env("NO_COLOR") && base::env("TERM").value_or("dumb") != "dumb";
  return {.out = wanted && ::isatty(STDOUT_FILENO) == 1,
          .err = wanted && ::isatty(STDERR_FILENO) == 1};
}

std::string line_prefix(const LaunchOptions& options, int rank, int local_rank) {
  const std::string host = base::hostname();
  std::string prefix = options.prefix;
  replace_all(prefix, "${host}", host.substr(0, host.find('.')));
  replace_all(prefix, "${rank}", std::to_string(rank));
  replace_all(prefix, "${local_rank}", std::to_string(local_rank));
  replace_all(prefix, "${role_name}", options.role);
  return prefix;
}

void LineSplitter::feed(std::string_view bytes, const Sink& sink) {
  for (size_t end = 0; (end = bytes.find('\n')) != std::string_view::npos;) {
    if (partial_.empty()) {
      sink(bytes.substr(0, end));
    } else {
      partial_.append(bytes.substr(0, end));
      sink(std::exchange(partial_, {}));
    }
    bytes.remove_prefix(end + 1);
  }
  partial_.append(bytes);
  if (partial_.size() > longest_) cut(0, sink);
}

void LineSplitter::cut(size_t rest, const Sink& sink) {
  const std::string line = std::exchange(partial_, partial_.substr(partial_.size() - rest));
  sink(std::string_view(line).substr(0, line.size() - rest));
}

void LineSplitter::finish(const Sink& sink) {
  if (!partial_.empty()) sink(std::exchange(partial_, {}));
}

Output::Output(OutputOptions options)
    : out_{std::move(options.out), StandardStream(STDOUT_FILENO), {}},
      err_{std::move(options.err), StandardStream(STDERR_FILENO), {}},
      same_destination_(is_same_destination()),
      speaks_for_job_(options.speaks_for_job) {}

Output::~Output() {
  erase_live();
  out_.stream.flush();
  err_.stream.flush();
}

void Output::begin_attempt(std::vector<WorkerOutput> workers) {
  run_ = 0;
  workers_ = std::vector<Worker>(workers.size());
  for (size_t i = 0; i < workers.size(); ++i) workers_[i].options = std::move(workers[i]);
}

void Output::log_to(size_t worker, Stream stream, const std::filesystem::path& file) {
  workers_[worker].of(stream).log = {file, "the log file"};
}

void Output::copy_filtered(Stream stream, const std::filesystem::path& file) {
  Destination& to = destination(stream);
  if (!to.options.filters.empty()) to.filtered = {file, "the log file"};
}

std::string Output::prefix_of(size_t worker, Stream stream) {
  const WorkerOutput& options = workers_[worker].options;
  std::string prefix = options.prefix;
  constexpr std::string_view kTime = "${time}";
  if (prefix.find(kTime) != std::string::npos) replace_all(prefix, kTime, time_of_day());
  const bool colours = destination(stream).options.takes_colours && !prefix.empty();
  return colours ? coloured(options.rank, prefix) : prefix;
}

LineSplitter::Sink Output::sink(size_t worker, Stream stream, std::string& text) {
  return [this, worker, stream, &text, prefix = prefix_of(worker, stream)](std::string_view whole) {
    Worker& from = workers_[worker];
    const Destination& to = destination(stream);
    const auto is_in_line = [whole](const std::string& one) {
      return whole.find(one) != std::string_view::npos;
    };
    if (std::ranges::any_of(to.options.filters, is_in_line)) {
      write_to_log(to.filtered, fmt::format("{}{}\n", prefix, whole));
    }
    from.of(stream).live.clear();
    const size_t passed = std::exchange(from.of(stream).passed, 0);
    // A carriage return would let the terminal overwrite the prefix.
    const std::string_view line = is_live(from, stream) ? last_part(whole) : whole;
    if (from.options.shown) {
      run_ = stream == Stream::kOut ? 0 : last_ == worker ? run_ + 1 : 1;
      last_ = worker;
    }
    if (stream == Stream::kErr) {
      from.tail.emplace_back(last_part(whole).substr(0, kTailLineLength));
      if (from.tail.size() > kTailLines) from.tail.pop_front();
    }
    if (from.options.whole_lines) text.append(prefix).append(line.substr(passed)).append("\n");
  };
}

// A full disk does not stop the run.
void Output::write_to_log(const OpenFile& log, std::string text) {
  files_.append(log, std::move(text), [this](const std::string& what) {
    if (log_error_.empty()) log_error_ = what;
  });
}

void Output::write_file(const std::string& file, FileWriter::Write write) {
  files_.add(file, std::move(write),
             [this](const std::string& what) { announce("warning: {}", what); });
}

void Output::write(size_t worker, Stream stream, std::string_view bytes) {
  WorkerStream& from = workers_[worker].of(stream);
  const WorkerOutput& options = workers_[worker].options;
  if (from.log.fd) write_to_log(from.log, std::string(bytes));
  const bool needs_lines =
      stream == Stream::kErr || options.whole_lines || !destination(stream).options.filters.empty();
  if (!needs_lines) {
    run_ = 0;
    if (options.shown) print(stream, bytes);
    return;
  }
  std::string text;
  from.lines.feed(bytes, sink(worker, stream, text));
  if (passes_pieces(options)) pass_piece(from, from.lines.partial().rfind('\r') + 1, text);
  if (!due_ && (is_live(workers_[worker], stream) || passes_pieces(options))) {
    due_ = Clock::now() + kLivePeriod;
  }
  if (options.shown) print(stream, options.whole_lines ? text : bytes);
}

void Output::finish(size_t worker, Stream stream) {
  std::string text;
  workers_[worker].of(stream).lines.finish(sink(worker, stream, text));
  const WorkerOutput& options = workers_[worker].options;
  if (options.shown && options.whole_lines) print(stream, text);
}

void Output::say(std::string_view message) {
  std::string text;
  // A worker's last line may have no newline.
  if (!at_line_start_ && err_.options.is_terminal) text = "\n";
  text.append(message);
  if (text.back() != '\n') text.push_back('\n');
  print(Stream::kErr, text);
}

void Output::set_bar(std::string bar) {
  // On a stopped terminal (Ctrl-S) bars would pile up.
  if (!err_.options.is_terminal || (err_.stream.pending() > 0 && !bar.empty())) return;
  erase_live();
  bar_ = std::move(bar);
  draw_live();
}

bool Output::tail_is_last(size_t worker) const {
  const Worker& from = workers_[worker];
  return from.options.shown && !from.tail.empty() && last_ == worker && run_ >= from.tail.size();
}

void Output::finish_files() {
  // Our reader does not wait for the files.
  if (!files_.finish(file_patience_, [this] { flush(); })) file_patience_ = std::chrono::seconds(1);
}

void Output::flush() {
  files_.handle();
  if (!files_.is_full()) {
    files_full_since_.reset();
  } else if (!files_full_since_) {
    files_full_since_ = Clock::now();
  } else if (Clock::now() - *files_full_since_ > kFilePatience) {
    files_full_since_ = Clock::time_point::max();  // said once
    announce("warning: {} does not answer; the workers that write to it wait", files_.current());
  }
  out_.stream.flush();
  err_.stream.flush();
}

void Output::add_to(std::vector<pollfd>& polls) const {
  for (const Destination* to : {&out_, &err_}) {
    if (to->stream.pending() > 0) polls.push_back({to->stream.fd(), POLLOUT, 0});
  }
  if (files_.is_full()) polls.push_back({files_.fd(), POLLIN, 0});
}

bool Output::is_full(Stream stream) {
  return queue(stream).pending() > kMaxPending || files_.is_full();
}

bool Output::reader_waits() {
  return queue(Stream::kOut).pending() > kMaxPending || err_.stream.pending() > kMaxPending;
}

std::optional<std::string> Output::error() const {
  const auto out = same_destination_ ? err_.stream.error() : out_.stream.error();
  if (out) return fmt::format("cannot write standard output: {}", std::strerror(*out));
  if (const auto err = err_.stream.error()) {
    return fmt::format("cannot write standard error: {}", std::strerror(*err));
  }
  if (!log_error_.empty()) return log_error_;
  return std::nullopt;
}

StandardStream& Output::queue(Stream stream) {
  return same_destination_ ? err_.stream : destination(stream).stream;
}

void Output::print(Stream stream, std::string_view text) {
  if (text.empty()) return;
  erase_live();
  queue(stream).write(text);
  if (destination(stream).options.is_terminal) at_line_start_ = text.back() == '\n';
  draw_live();
}

void Output::show_partial_lines() {
  const auto now = Clock::now();
  if (!due_ || now < *due_) return;
  if (err_.stream.pending() > 0) {
    due_ = now + kLivePeriod;
    return;
  }
  due_.reset();
  for (Worker& worker : workers_) {
    for (const Stream stream : {Stream::kOut, Stream::kErr}) {
      WorkerStream& from = worker.of(stream);
      if (is_live(worker, stream)) from.live = visible(last_part(from.lines.partial()));
      std::string piece;
      if (passes_pieces(worker.options)) pass_piece(from, from.lines.partial().size(), piece);
      print(stream, piece);
    }
  }
  erase_live();
  draw_live();
}

bool Output::is_live(const Worker& worker, Stream stream) {
  return worker.options.shown && !worker.options.prefix.empty() && err_.options.is_terminal &&
         destination(stream).options.is_terminal;
}

bool Output::passes_pieces(const WorkerOutput& options) {
  return options.shown && options.whole_lines && options.prefix.empty();
}

void Output::pass_piece(WorkerStream& from, size_t end, std::string& text) {
  if (end <= from.passed) return;
  text += from.lines.partial().substr(from.passed, end - from.passed);
  from.passed = end;
}

void Output::clear_live() {
  for (Worker& worker : workers_) {
    for (WorkerStream* from : {&worker.out, &worker.err}) from->live.clear();
  }
  due_.reset();
  set_bar({});
}

std::vector<std::string> Output::live_lines() {
  std::vector<std::string> lines;
  for (const Worker& worker : workers_) {
    if (lines.size() >= kMaxLive) break;
    for (const WorkerStream* from : {&worker.out, &worker.err}) {
      if (from->live.empty()) continue;
      const WorkerOutput& options = worker.options;
      std::string line = truncated(options.prefix + from->live, base::terminal_columns() - 1);
      const size_t prefix = std::min(options.prefix.size(), line.size());
      if (err_.options.takes_colours && prefix > 0) {
        line.replace(0, prefix, coloured(options.rank, line.substr(0, prefix)));
      }
      lines.push_back(line);
    }
  }
  if (!bar_.empty()) lines.push_back(bar_);
  return lines;
}

void Output::erase_live() {
  if (drawn_lines_ == 0) return;
  std::string up;
  for (size_t i = 1; i < drawn_lines_; ++i) up += "\x1b[A\x1b[K";
  err_.stream.write("\r\x1b[K" + up);
  drawn_lines_ = 0;
}

void Output::draw_live() {
  // erase_live() would also erase half a line before it.
  if (!at_line_start_) return;
  const std::vector<std::string> lines = live_lines();
  err_.stream.write(base::join(lines, "\n"));
  drawn_lines_ = lines.size();
}

void OutputPipes::add_to(std::vector<pollfd>& polls, Output& output) const {
  if (out && !output.is_full(Stream::kOut)) polls.push_back({out.get(), POLLIN, 0});
  if (err && !output.is_full(Stream::kErr)) polls.push_back({err.get(), POLLIN, 0});
}

void OutputPipes::read(Output& output, const Sink& sink) {
  for (const Stream stream : {Stream::kOut, Stream::kErr}) {
    if (!output.is_full(stream)) read_stream(stream, sink);
  }
}

void OutputPipes::drain(const Sink& sink) {
  constexpr int kMaxReads = 64;
  for (int i = 0; i < kMaxReads; ++i) {
    const bool more_out = read_stream(Stream::kOut, sink);
    const bool more_err = read_stream(Stream::kErr, sink);
    if (!more_out && !more_err) return;
  }
}

bool OutputPipes::read_stream(Stream stream, const Sink& sink) {
  ReadBuffer buffer;
  const std::string_view bytes = read_some(stream == Stream::kOut ? out : err, buffer);
  if (!bytes.empty()) sink(stream, bytes);
  return !bytes.empty();
}

int wait_for_reader(Output& output, Signals& signals, int exit_code, bool interrupted) {
  constexpr std::chrono::milliseconds kPatience{1000};
  const auto deadline = Clock::now() + kPatience;
  for (;;) {
    output.flush();
    std::vector<pollfd> polls{{signals.fd(), POLLIN, 0}};
    output.add_to(polls);
    const bool all_written = polls.size() == 1;
    if (all_written || (interrupted && Clock::now() >= deadline)) break;
    ::poll(polls.data(), polls.size(), interrupted ? static_cast<int>(kPatience.count()) : -1);
    while (const auto signal = signals.next()) {
      if (*signal == SIGTSTP) Signals::stop_self();
      if (!signals.ends(*signal)) continue;
      return exit_code != base::kExitOk ? exit_code : base::kExitSignalBase + *signal;
    }
  }
  const auto error = output.error();
  if (!error) return exit_code;
  output.announce("error: {}; later output of the workers is lost", *error);
  return exit_code != base::kExitOk ? exit_code : base::kExitUnavailable;
}

}  // namespace syncbn::launch
