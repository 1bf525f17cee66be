#include "commands/run_view.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/progress_bar.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/task.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "common/mean_of_present.h"
#include "records/folder_lock.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

constexpr std::array kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
// Grace period in seconds for the restart of a run that no process writes to.
constexpr double kQuiet = 30;
constexpr const char* kStepLoss = "step loss";

// Terminal colours (ECMA-48, SGR).
constexpr const char* kGreen = "\x1b[32m";
constexpr const char* kRed = "\x1b[31m";
constexpr const char* kCyan = "\x1b[36m";
constexpr const char* kPlain = "\x1b[0m";

/// Means of `count` successive ranges of the values, without NaN.
std::vector<double> means_of(const std::vector<double>& values, size_t count) {
  std::vector<double> means;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * values.size() / count;
    const std::span range(values.data() + begin, (i + 1) * values.size() / count - begin);
    // The log has no infinite values.
    means.push_back(mean_of_present(range, std::numeric_limits<double>::quiet_NaN()));
  }
  return means;
}

/// A key of the run's configuration; 0 without it.
int64_t setting_of(const std::filesystem::path& folder, const char* key) {
  const auto text = run_files::config_of(folder);
  if (!text) return 0;
  const config::Value config = config::parse_yaml(*text, folder.string());
  const config::Value* const value = config.find(key);
  return value == nullptr ? 0 : base::parse_number<int64_t>(value->scalar).value_or(0);
}

/// A name of the log as it is shown: with spaces, and without control characters.
std::string spaced(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return base::printable(name);
}

/// The label of a number of the log, by its name with spaces. As in assets/format.js, but shorter.
std::string label_of(const std::string& name) {
  static const std::map<std::string, std::string> kLabels = {
      {"lr", "learning rate"},
      {"images per second", "images/s"},
      {"data wait seconds", "data wait per step"},
      {"data wait share", "data wait"},
      {"memory bytes", "memory"},
      {"gpu memory bytes", "GPU memory"},
      {"gpu utilization", "GPU utilization"},
      {"seconds", "time"},
  };
  const auto found = kLabels.find(name);
  return found == kLabels.end() ? name : found->second;
}

/// A number of the log as text, by its name with spaces.
std::string number_text(const std::string& name, double value) {
  const std::string words = " " + name + " ";
  const auto has = [&](std::string_view word) {
    return words.find(fmt::format(" {} ", word)) != words.npos;
  };
  if (!std::isfinite(value)) return fmt::format("{}", value);
  if (has("bytes")) return base::format_bytes(static_cast<uint64_t>(std::max(0.0, value)));
  if (is_share(name)) return fmt::format("{:.2f} %", 100 * value);
  if (has("seconds")) return base::format_seconds(value);
  return fmt::format("{:.4g}", value);
}

/// Keeps both ends of a name that is too long: "test accuracy cat" and "test accuracy dog" begin
/// alike, "train accuracy" and "test accuracy" end alike.
std::string name_in(const std::string& name, int width) {
  const int excess = base::columns_of(name) - std::max(width, 1);
  if (excess <= 0) return name;
  const std::string head = base::truncated(name, (width - 1) / 2);
  const int left_out = base::columns_of(head) + excess + 1;
  return head + "…" + name.substr(base::truncated(name, left_out).size());
}

}  // namespace

std::string sparkline(const std::vector<double>& values, int width) {
  const size_t count = std::min(values.size(), static_cast<size_t>(std::max(width, 0)));
  const std::vector<double> shown = means_of(values, count);
  double least = std::numeric_limits<double>::infinity();
  double greatest = -least;
  for (const double value : shown) {
    if (!std::isfinite(value)) continue;
    least = std::min(least, value);
    greatest = std::max(greatest, value);
  }
  std::string line;
  for (const double value : shown) {
    // Equal values show as half a block.
    const double height = greatest > least ? (value - least) / (greatest - least) : 0.5;
    const auto index =
        static_cast<size_t>(std::isfinite(value) ? height * (kBlocks.size() - 1) : 0);
    line += std::isfinite(value) ? kBlocks.at(index) : " ";
  }
  return line;
}

RunView::RunView(std::filesystem::path folder) : folder_(std::move(folder)), log_(folder_) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder_, error)) {
    const bool is_missing = !error || error == std::errc::no_such_file_or_directory;
    throw base::UserError(fmt::format("watch: there is no folder {}{}", folder_.string(),
                                      is_missing ? "" : ": " + error.message()));
  }
  if (!base::exists(folder_ / run_files::kLog)) {
    throw base::UserError(
        fmt::format("watch: {} is not the folder of a run: it has no {}; name one that train wrote "
                    "to, such as runs/digits",
                    folder_.string(), run_files::kLog));
  }
  epochs_ = setting_of(folder_, "epochs");
  first_epoch_ = setting_of(folder_, "start_epoch") + 1;
  update();
}

void RunView::update() {
  // First: a run that has ended by then has written its last line before.
  is_locked_ = is_locked(folder_);
  now_ = unix_time();
  if (log_.is_replaced()) {
    series_.clear();
    numbers_.clear();
    last_ = {};
  }
  if (is_locked_) has_told_wait_ = false;
  log_.read(ReadSteps::kYes, [this](const nlohmann::ordered_json& line) { take(line); });
}

void RunView::take(const nlohmann::ordered_json& line) {
  if (const auto record = record_of(line)) return add(*record);
  const auto event = field_of<std::string>(line, "event", "");
  if (event == "end") {
    end_ = field_of<std::string>(line, "reason", "");
    last_.step = field_of(line, "step", last_.step);
  }
  if (event != "start") return;
  check_format(folder_, line);
  end_.reset();
  has_told_end_ = false;
  ranks_ = field_of<int64_t>(line, "world_size", 0);
  first_step_ = field_of<int64_t>(line, "step", 0);
  total_steps_ = field_of<int64_t>(line, "total_steps", 0);
  started_ = field_of(line, "time", 0.0);
  // The epoch of the next step, as the run's own bar shows it.
  int64_t epoch = std::max(first_epoch_, last_.epoch + (last_.event == "epoch" ? 1 : 0));
  if (epochs_ > 0) epoch = std::min(epoch, epochs_);
  last_ = {.event = event, .time = started_, .epoch = epoch, .step = first_step_};
}

void RunView::add(const LogRecord& record) {
  for (const auto& [name, value] : record.values) {
    if (record.event == "step" && name == "loss") {
      series(kStepLoss).values.push_back(value);
      last_loss_ = value;
    }
    if (record.event == "epoch") series(spaced(name)).values.push_back(value);
  }
  last_ = record;
  // A log that was rewound repeats some epochs.
  const std::pair now(record.time, record.epoch);
  if (record.event == "epoch" && now > newest_) {
    new_epochs_.push_back(record);
    newest_ = now;
  }
}

RunView::Series& RunView::series(const std::string& name) {
  const auto [found, is_new] = numbers_.try_emplace(name, series_.size());
  if (is_new) series_.push_back({.name = name, .values = {}});
  return series_[found->second];
}

bool RunView::is_of_class(const Series& one) const {
  for (size_t end = one.name.find(' '); end != one.name.npos; end = one.name.find(' ', end + 1)) {
    if (numbers_.contains(one.name.substr(0, end))) return true;
  }
  return false;
}

RunView::State RunView::state() const {
  if (is_locked_) return State::kRunning;
  return end_ == "finished" ? State::kFinished : State::kStopped;
}

bool RunView::is_over() const {
  return !is_locked_ && (end_ == "finished" || now_ - log_.changed() > kQuiet);
}

std::string RunView::state_text() const {
  const double quiet = now_ - log_.changed();
  if (state() == State::kFinished) return "finished";
  if (state() == State::kRunning) {
    return quiet < kQuiet ? "running"
                          : "running, no line for " + base::format_seconds(std::floor(quiet));
  }
  const std::string text = end_        ? "stopped: " + base::printable(*end_)
                           : is_over() ? "stopped without a last line: killed, or its host failed"
                                       : "no process writes to it";
  if (is_over()) return text;
  return fmt::format("{}; watch ends in {:.0f} s unless it is restarted", text,
                     std::ceil(kQuiet - quiet));
}

std::string RunView::progress(int columns) const {
  std::string text =
      fmt::format("epoch {}{}", last_.epoch, epochs_ > 0 ? fmt::format("/{}", epochs_) : "");
  if (last_loss_) text += "  loss " + shown({}, *last_loss_);
  base::ProgressState progress{.done = static_cast<uint64_t>(last_.step),
                               .total = static_cast<uint64_t>(total_steps_),
                               .text = text};
  progress.elapsed =
      std::chrono::duration<double>(std::max(0.0, (is_locked_ ? now_ : last_.time) - started_));
  if (state() == State::kRunning && last_.step > first_step_ && total_steps_ >= last_.step) {
    const double pace = (last_.time - started_) / static_cast<double>(last_.step - first_step_);
    const double left = pace * static_cast<double>(total_steps_ - last_.step);
    progress.remaining = std::chrono::duration<double>(std::max(0.0, left - (now_ - last_.time)));
  }
  return base::render_progress(progress, columns);
}

std::vector<std::string> RunView::screen(int columns, int rows, bool colours) const {
  const auto coloured = [&](const char* colour, const std::string& text) {
    return colours ? colour + text + kPlain : text;
  };
  const char* const colour = state() == State::kRunning    ? kCyan
                             : state() == State::kFinished ? kGreen
                                                           : kRed;
  const std::filesystem::path name_of_run = folder_.has_filename() ? folder_.filename() : folder_;
  std::string head = fmt::format("{}  {}", base::printable(name_of_run.string()), state_text());
  if (ranks_ > 0) head += "  " + base::counted(ranks_, "rank");
  std::vector<std::string> lines = {coloured(colour, base::truncated(head, columns - 1)),
                                    progress(columns)};
  lines.resize(std::min(lines.size(), static_cast<size_t>(std::max(rows, 1))));

  // The results of single classes, such as "test accuracy cat", come last.
  std::vector<const Series*> ordered;
  for (const Series& one : series_) ordered.push_back(&one);
  std::ranges::stable_partition(ordered, [this](const Series* one) { return !is_of_class(*one); });
  constexpr int kValue = 9;
  int widest = 0;
  for (const Series& one : series_) widest = std::max(widest, base::columns_of(label_of(one.name)));
  const int name = std::min(widest, std::max(columns / 2, 1));
  if (!series_.empty() && rows > 5) {
    lines.push_back(base::truncated(
        fmt::format("{:{}} {:>{}} over the run: ▁ low, █ high", "", name, "latest", kValue),
        columns - 1));
  }
  const size_t room = static_cast<size_t>(std::max(rows, 1)) - lines.size();
  const bool fit = series_.size() <= room;
  const size_t shown = fit ? series_.size() : room - std::min<size_t>(room, 1);
  for (size_t i = 0; i < shown; ++i) {
    const Series& one = *ordered[i];
    const std::string text = fmt::format("{:<{}} {:>{}} ", name_in(label_of(one.name), name), name,
                                         number_text(one.name, one.values.back()), kValue);
    const int left = columns - 1 - base::columns_of(text);
    lines.push_back(base::truncated(text, columns - 1) +
                    coloured(kCyan, sparkline(one.values, left)));
  }
  if (!fit && room > 0) {
    lines.push_back(
        base::truncated(fmt::format("… and {} more", series_.size() - shown), columns - 1));
  }
  return lines;
}

std::vector<std::string> RunView::news() {
  std::vector<std::string> lines;
  for (const LogRecord& epoch : std::exchange(new_epochs_, {})) {
    std::vector<std::string> parts = {fmt::format("epoch {}", epoch.epoch),
                                      fmt::format("step {}", epoch.step)};
    for (const auto& [name, value] : epoch.values) {
      const std::string shown = spaced(name);
      parts.push_back(label_of(shown) + " " + number_text(shown, value));
    }
    lines.push_back(base::join(parts, "  "));
  }
  if (is_over()) {
    if (!std::exchange(has_told_end_, true)) lines.push_back(state_text());
  } else if (!is_locked_ && !std::exchange(has_told_wait_, true)) {
    lines.push_back(state_text());
  }
  return lines;
}

}  // namespace syncbn::train
