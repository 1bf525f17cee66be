#include "output.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "log_folder.h"

namespace syncbn::launch {
namespace {

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

// A disk that is full must not stop the run.
void write_to_log(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
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
      err_(STDERR_FILENO) {}

Output::~Output() {
  erase_bar();
  flush();
}

void Output::begin_attempt(std::vector<WorkerOutput> workers, const std::filesystem::path& folder) {
  workers_ = std::vector<Worker>(workers.size());
  for (size_t i = 0; i < workers.size(); ++i) workers_[i].options = std::move(workers[i]);
  if (!options_.out_filters.empty()) {
    filtered_out_ = LogFolder::open(folder / "filtered_stdout.log");
  }
  if (!options_.err_filters.empty()) {
    filtered_err_ = LogFolder::open(folder / "filtered_stderr.log");
  }
}

void Output::log_to(size_t worker, Stream stream, base::UniqueFd file) {
  workers_[worker].of(stream).log = std::move(file);
}

std::string Output::prefix_of(size_t worker, Stream stream) const {
  const WorkerOutput& options = workers_[worker].options;
  std::string prefix = options.prefix;
  constexpr std::string_view kTime = "${time}";
  if (const size_t at = prefix.find(kTime); at != std::string::npos) {
    prefix.replace(at, kTime.size(), time_of_day());
  }
  const bool terminal =
      stream == Stream::kOut ? options_.out_is_terminal : options_.err_is_terminal;
  return terminal && options_.colour ? coloured(options.rank, prefix) : prefix;
}

LineSplitter::Sink Output::sink(size_t worker, Stream stream, std::string& text) {
  return [this, worker, stream, &text, prefix = prefix_of(worker, stream)](std::string_view line) {
    ++lines_;
    if (stream == Stream::kErr) {
      auto& tail = workers_[worker].tail;
      tail.push_back({lines_, std::string(line)});
      if (tail.size() > kTailLines) tail.pop_front();
    }
    filter(stream, prefix, line);
    if (prefix.empty()) return;
    text.append(prefix).append(line).append("\n");
  };
}

void Output::filter(Stream stream, const std::string& prefix, std::string_view line) {
  const bool is_out = stream == Stream::kOut;
  const auto& texts = is_out ? options_.out_filters : options_.err_filters;
  const auto is_in_line = [line](const std::string& text) {
    return line.find(text) != std::string_view::npos;
  };
  if (std::none_of(texts.begin(), texts.end(), is_in_line)) return;
  write_to_log((is_out ? filtered_out_ : filtered_err_).get(), fmt::format("{}{}\n", prefix, line));
}

void Output::write(size_t worker, Stream stream, std::string_view bytes) {
  WorkerStream& from = workers_[worker].of(stream);
  if (from.log) write_to_log(from.log.get(), bytes);
  std::string text;
  from.lines.feed(bytes, sink(worker, stream, text));
  const WorkerOutput& options = workers_[worker].options;
  if (options.shown) print(stream, options.prefix.empty() ? bytes : text);
}

void Output::finish(size_t worker, Stream stream) {
  std::string text;
  workers_[worker].of(stream).lines.finish(sink(worker, stream, text));
  const WorkerOutput& options = workers_[worker].options;
  if (options.shown && !options.prefix.empty()) print(stream, text);
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
