#include "output.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>

namespace syncbn::launch {
namespace {

std::string coloured(int rank, const std::string& text) {
  // Readable on dark and on light backgrounds; red is left to errors.
  constexpr std::array kColours{36, 33, 35, 32, 34, 96, 95, 92};
  return fmt::format("\x1b[{}m{}\x1b[0m", kColours[static_cast<size_t>(rank) % kColours.size()],
                     text);
}

bool is_one_terminal(const OutputOptions& options) {
  struct stat out {};
  struct stat err {};
  return options.out_is_terminal && options.err_is_terminal && ::fstat(STDOUT_FILENO, &out) == 0 &&
         ::fstat(STDERR_FILENO, &err) == 0 && out.st_rdev == err.st_rdev;
}

}  // namespace

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
    : options_(std::move(options)),
      one_terminal_(is_one_terminal(options_)),
      out_(STDOUT_FILENO),
      err_(STDERR_FILENO),
      workers_(options_.ranks.size()) {
  for (size_t i = 0; i < workers_.size(); ++i) {
    workers_[i].prefix = fmt::format("[{}] ", options_.ranks[i]);
    if (options_.colour) workers_[i].prefix = coloured(options_.ranks[i], workers_[i].prefix);
  }
}

Output::~Output() {
  erase_bar();
  flush();
}

std::string Output::prefix_of(const Worker& worker, Stream stream) const {
  const bool terminal =
      stream == Stream::kOut ? options_.out_is_terminal : options_.err_is_terminal;
  if (terminal || !options_.colour) return worker.prefix;
  const auto rank = options_.ranks[static_cast<size_t>(&worker - workers_.data())];
  return fmt::format("[{}] ", rank);
}

LineSplitter::Sink Output::sink(Worker& worker, Stream stream, std::string& text) {
  return [this, &worker, stream, &text, prefix = prefix_of(worker, stream)](std::string_view line) {
    ++lines_;
    if (stream == Stream::kErr) {
      worker.tail.push_back({lines_, std::string(line)});
      if (worker.tail.size() > kTailLines) worker.tail.pop_front();
    }
    if (!options_.prefix) return;
    text.append(prefix).append(line).append("\n");
  };
}

void Output::write(size_t worker, Stream stream, std::string_view bytes) {
  Worker& from = workers_[worker];
  std::string text;
  (stream == Stream::kOut ? from.out : from.err).feed(bytes, sink(from, stream, text));
  print(stream, options_.prefix ? text : bytes);
}

void Output::finish(size_t worker, Stream stream) {
  Worker& from = workers_[worker];
  std::string text;
  (stream == Stream::kOut ? from.out : from.err).finish(sink(from, stream, text));
  if (options_.prefix) print(stream, text);
}

void Output::say(std::string_view message) {
  std::string text;
  // After a worker's last words without a newline.
  if (!at_line_start_ && options_.err_is_terminal) text = "\n";
  text.append(message);
  if (text.back() != '\n') text.push_back('\n');
  print(Stream::kErr, text);
}

void Output::set_bar(std::string bar) {
  // One that nobody sees (Ctrl-S) would pile up.
  if (!options_.err_is_terminal || (err_.pending() > 0 && !bar.empty())) return;
  erase_bar();
  bar_ = std::move(bar);
  draw_bar();
}

std::vector<std::string> Output::tail(size_t worker) const {
  std::vector<std::string> lines;
  for (const TailLine& line : workers_[worker].tail) lines.push_back(line.text);
  return lines;
}

bool Output::tail_is_last(size_t worker) const {
  const auto& tail = workers_[worker].tail;
  return !tail.empty() && tail.front().number + tail.size() == lines_ + 1;
}

void Output::flush() {
  out_.flush();
  err_.flush();
}

std::vector<int> Output::waits_for() const {
  std::vector<int> fds;
  for (const StandardStream* stream : {&out_, &err_}) {
    if (stream->pending() > 0) fds.push_back(stream->fd());
  }
  return fds;
}

bool Output::is_full(Stream stream) const {
  return stream_of(stream).pending() > kMostPending;
}

std::optional<std::string> Output::error() const {
  if (const auto error = out_.error()) {
    return fmt::format("cannot write standard output: {}", std::strerror(*error));
  }
  return std::nullopt;
}

const StandardStream& Output::stream_of(Stream stream) const {
  return stream == Stream::kOut && !one_terminal_ ? out_ : err_;
}

void Output::print(Stream stream, std::string_view text) {
  if (text.empty()) return;
  erase_bar();
  (&stream_of(stream) == &out_ ? out_ : err_).write(text);
  const bool terminal =
      stream == Stream::kOut ? options_.out_is_terminal : options_.err_is_terminal;
  if (terminal) at_line_start_ = text.back() == '\n';
  draw_bar();
}

void Output::erase_bar() {
  if (std::exchange(bar_is_drawn_, false)) err_.write("\r\x1b[K");
}

void Output::draw_bar() {
  // Never behind half a line, which erasing the bar would take along.
  if (bar_.empty() || !at_line_start_) return;
  err_.write(bar_);
  bar_is_drawn_ = true;
}

}  // namespace syncbn::launch
