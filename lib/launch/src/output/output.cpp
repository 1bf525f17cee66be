#include "output/output.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/terminal.h>
#include <syncbn/base/text.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "output/log_folder.h"

namespace syncbn::launch {
namespace {

using base::truncated;

std::string coloured(int rank, const std::string& text) {
  // Readable on dark and on light backgrounds; red is left to errors.
  constexpr std::array kColours{36, 33, 35, 32, 34, 96, 95, 92};
  return fmt::format("\x1b[{}m{}\x1b[0m", kColours[static_cast<size_t>(rank) % kColours.size()],
                     text);
}

std::string time_of_day() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  return fmt::format("{:%H:%M:%S}", parts);
}

// Lines that have begun are shown so often, and so many.
constexpr std::chrono::milliseconds kLivePeriod{100};
constexpr size_t kMostLive = 16;

// Of a line that is written over after carriage returns, what is to be seen in the end.
std::string_view last_part(std::string_view line) {
  const size_t end = line.find_last_not_of('\r');
  line = line.substr(0, end == std::string_view::npos ? 0 : end + 1);
  const size_t start = line.rfind('\r');
  return start == std::string_view::npos ? line : line.substr(start + 1);
}

// Without what moves a terminal's cursor or colours.
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

bool lead_to_the_same() {
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
  if (partial_.size() > kLongest) sink(std::exchange(partial_, {}));
}

void LineSplitter::finish(const Sink& sink) {
  if (!partial_.empty()) sink(std::exchange(partial_, {}));
}

Output::Output(OutputOptions options)
    : out_{std::move(options.out), StandardStream(STDOUT_FILENO), {}},
      err_{std::move(options.err), StandardStream(STDERR_FILENO), {}},
      same_destination_(lead_to_the_same()) {}

Output::~Output() {
  erase_live();
  flush();
}

void Output::begin_attempt(std::vector<WorkerOutput> workers) {
  workers_ = std::vector<Worker>(workers.size());
  for (size_t i = 0; i < workers.size(); ++i) workers_[i].options = std::move(workers[i]);
}

void Output::log_to(size_t worker, Stream stream, const std::filesystem::path& file) {
  workers_[worker].of(stream).log = {LogFolder::open(file), file};
}

void Output::copy_filtered(Stream stream, const std::filesystem::path& file) {
  destination(stream).filtered = {LogFolder::open(file), file};
}

std::string Output::prefix_of(size_t worker, Stream stream) {
  const WorkerOutput& options = workers_[worker].options;
  std::string prefix = options.prefix;
  constexpr std::string_view kTime = "${time}";
  for (size_t at = 0; (at = prefix.find(kTime)) != std::string::npos;) {
    prefix.replace(at, kTime.size(), time_of_day());
  }
  const bool colours = destination(stream).options.takes_colours && !prefix.empty();
  return colours ? coloured(options.rank, prefix) : prefix;
}

LineSplitter::Sink Output::sink(size_t worker, Stream stream, std::string& text) {
  return [this, worker, stream, &text, prefix = prefix_of(worker, stream)](std::string_view whole) {
    Worker& from = workers_[worker];
    filter(stream, prefix, whole);
    from.of(stream).live.clear();
    const size_t passed = std::exchange(from.of(stream).passed, 0);
    // After a carriage return a terminal would overwrite the prefix.
    const std::string_view line = is_live(from, stream) ? last_part(whole) : whole;
    if (from.options.shown) ++lines_;
    if (stream == Stream::kErr) {
      from.tail.push_back({lines_, std::string(last_part(whole).substr(0, kTailLineLength))});
      if (from.tail.size() > kTailLines) from.tail.pop_front();
    }
    if (from.options.whole_lines) text.append(prefix).append(line.substr(passed)).append("\n");
  };
}

void Output::filter(Stream stream, const std::string& prefix, std::string_view line) {
  const Destination& to = destination(stream);
  const auto is_in_line = [line](const std::string& text) {
    return line.find(text) != std::string_view::npos;
  };
  if (std::none_of(to.options.filters.begin(), to.options.filters.end(), is_in_line)) return;
  write_to_log(to.filtered, fmt::format("{}{}\n", prefix, line));
}

// A disk that is full does not stop the run.
void Output::write_to_log(const LogFile& log, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(log.fd.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      if (log_error_.empty()) {
        log_error_ = fmt::format("cannot write {}: {}", log.path.string(), std::strerror(errno));
      }
      return;
    }
    text.remove_prefix(static_cast<size_t>(written));
  }
}

bool Output::needs_lines(size_t worker, Stream stream) {
  return stream == Stream::kErr || workers_[worker].options.whole_lines ||
         !destination(stream).options.filters.empty();
}

void Output::write(size_t worker, Stream stream, std::string_view bytes) {
  WorkerStream& from = workers_[worker].of(stream);
  if (from.log.fd) write_to_log(from.log, bytes);
  if (!needs_lines(worker, stream)) {
    ++lines_;  // one or more
    if (workers_[worker].options.shown) print(stream, bytes);
    return;
  }
  std::string text;
  from.lines.feed(bytes, sink(worker, stream, text));
  const WorkerOutput& options = workers_[worker].options;
  if (passes_pieces(options)) pass_piece(from, from.lines.partial().rfind('\r') + 1, text);
  if (!due_ && (is_live(workers_[worker], stream) || passes_pieces(options)))
    due_ = std::chrono::steady_clock::now() + kLivePeriod;
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
  // After a worker's last words without a newline.
  if (!at_line_start_ && err_.options.is_terminal) text = "\n";
  text.append(message);
  if (text.back() != '\n') text.push_back('\n');
  print(Stream::kErr, text);
}

void Output::set_bar(std::string bar) {
  // One that nobody sees (Ctrl-S) would pile up.
  if (!err_.options.is_terminal || (err_.stream.pending() > 0 && !bar.empty())) return;
  erase_live();
  bar_ = std::move(bar);
  draw_live();
}

std::vector<std::string> Output::tail(size_t worker) const {
  std::vector<std::string> lines;
  for (const TailLine& line : workers_[worker].tail) lines.push_back(line.text);
  return lines;
}

bool Output::tail_is_last(size_t worker) const {
  const Worker& from = workers_[worker];
  const auto& tail = from.tail;
  return from.options.shown && !tail.empty() && tail.front().number + tail.size() == lines_ + 1;
}

void Output::flush() {
  out_.stream.flush();
  err_.stream.flush();
}

std::vector<int> Output::waits_for() const {
  std::vector<int> fds;
  for (const Destination* to : {&out_, &err_}) {
    if (to->stream.pending() > 0) fds.push_back(to->stream.fd());
  }
  return fds;
}

bool Output::is_full(Stream stream) {
  return queue(stream).pending() > kMostPending;
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
  const auto now = std::chrono::steady_clock::now();
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

std::string Output::live_line(size_t worker, const std::string& live) const {
  std::string line =
      truncated(workers_[worker].options.prefix + live, base::terminal_columns() - 1);
  const size_t prefix = std::min(workers_[worker].options.prefix.size(), line.size());
  if (!err_.options.takes_colours || prefix == 0) return line;
  return coloured(workers_[worker].options.rank, line.substr(0, prefix)) + line.substr(prefix);
}

std::vector<std::string> Output::live_lines() {
  std::vector<std::string> lines;
  for (size_t i = 0; i < workers_.size() && lines.size() < kMostLive; ++i) {
    for (const WorkerStream* from : {&workers_[i].out, &workers_[i].err}) {
      if (!from->live.empty()) lines.push_back(live_line(i, from->live));
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
  // Never behind half a line, which erasing would take along.
  if (!at_line_start_) return;
  const std::vector<std::string> lines = live_lines();
  err_.stream.write(base::join(lines, "\n"));
  drawn_lines_ = lines.size();
}

}  // namespace syncbn::launch
