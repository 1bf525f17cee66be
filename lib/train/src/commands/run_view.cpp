#include "commands/run_view.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/progress_bar.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "records/folder_lock.h"
#include "records/run_folder.h"

namespace syncbn::train {
namespace {

constexpr std::array kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
constexpr double kQuiet = 30;  // seconds without a process and a line after which a run is over
constexpr const char* kStepLoss = "step loss";

// Terminal colours (ECMA-48, SGR).
constexpr const char* kGreen = "\x1b[32m";
constexpr const char* kRed = "\x1b[31m";
constexpr const char* kCyan = "\x1b[36m";
constexpr const char* kPlain = "\x1b[0m";

/// Means of `count` ranges of the values, without NaN.
std::vector<double> means_of(const std::vector<double>& values, size_t count) {
  std::vector<double> means;
  for (size_t i = 0; i < count; ++i) {
    double sum = 0;
    double numbers = 0;
    for (size_t at = i * values.size() / count; at < (i + 1) * values.size() / count; ++at) {
      if (!std::isfinite(values[at])) continue;
      sum += values[at];
      ++numbers;
    }
    means.push_back(numbers > 0 ? sum / numbers : std::numeric_limits<double>::quiet_NaN());
  }
  return means;
}

int64_t epochs_of(const std::filesystem::path& folder) {
  const auto text = RunFolder::config_of(folder);
  if (!text) return 0;
  const config::Value config = config::parse_yaml(*text, folder.string());
  const config::Value* const epochs = config.find("epochs");
  return epochs == nullptr ? 0 : base::parse_number<int64_t>(epochs->scalar).value_or(0);
}

/// A name of the log, without control characters, as it is shown.
std::string spaced(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return base::printable(name);
}

/// The end of a name that is too long: "test accuracy cat" and "test accuracy dog" begin alike.
std::string name_in(const std::string& name, int width) {
  const auto room = static_cast<size_t>(std::max(width, 1));
  return name.size() <= room ? name : "…" + name.substr(name.size() - room + 1);
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
    // Equal values are half a block.
    const double height = greatest > least ? (value - least) / (greatest - least) : 0.5;
    const auto index =
        static_cast<size_t>(std::isfinite(value) ? height * (kBlocks.size() - 1) : 0);
    line += std::isfinite(value) ? kBlocks.at(index) : " ";
  }
  return line;
}

RunView::RunView(std::filesystem::path folder) : folder_(std::move(folder)) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder_, ignored)) {
    throw base::UserError(fmt::format("watch: there is no folder {}", folder_.string()));
  }
  if (!std::filesystem::exists(RunFolder::log(folder_), ignored)) {
    throw base::UserError(
        fmt::format("watch: {} is not the folder of a run: it has no {}; name one that train wrote "
                    "to, such as runs/digits",
                    folder_.string(), RunFolder::log(folder_).filename().string()));
  }
  epochs_ = epochs_of(folder_);
  update();
}

void RunView::update() {
  // First: a run that ends in between has written its last line by then.
  is_locked_ = is_locked(folder_);
  now_ = unix_time();
  struct stat status {};
  const std::filesystem::path log = RunFolder::log(folder_);
  if (::stat(log.c_str(), &status) != 0) return;  // someone has removed the folder
  // A run that resumes replaces the log by a shorter one.
  if (status.st_ino != file_ || status.st_size < read_) {
    read_ = 0;
    series_.clear();
    numbers_.clear();
  }
  file_ = status.st_ino;
  written_ = static_cast<double>(status.st_mtim.tv_sec);
  std::ifstream file(log);
  file.seekg(read_);
  // The last line may not be whole yet.
  for (std::string line; std::getline(file, line) && !file.eof();) {
    read_ = file.tellg();
    read_line(line);
  }
}

void RunView::read_line(const std::string& line) {
  if (const auto record = parse_record(line)) return add(*record);
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return;
  try {
    const std::string event = json.value("event", "");
    if (event == "end") end_ = json.value("reason", "");
    if (event != "start") return;
    end_.reset();
    has_told_end_ = false;
    ranks_ = json.value("world_size", int64_t{0});
    first_step_ = json.value("step", int64_t{0});
    total_steps_ = json.value("total_steps", int64_t{0});
    started_ = json.value("time", 0.0);
    last_ = {.event = event, .time = started_, .step = first_step_};
  } catch (const nlohmann::json::type_error&) {
    // Something else wrote this line.
  }
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
  // A log that was rewound has some epochs again.
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

RunView::State RunView::state() const {
  if (is_locked_) return State::kRunning;
  return end_ == "finished" ? State::kFinished : State::kStopped;
}

bool RunView::is_over() const {
  return !is_locked_ && (end_ || now_ - written_ > kQuiet);
}

std::string RunView::state_text() const {
  switch (state()) {
    case State::kRunning: {
      const double quiet = now_ - written_;
      return quiet < kQuiet ? "running"
                            : "running, no line for " + base::format_seconds(std::floor(quiet));
    }
    case State::kFinished:
      return "finished";
    default:
      return end_ ? "stopped: " + base::printable(*end_)
                  : "stopped without a last line: killed, or its host failed";
  }
}

std::string RunView::progress(int columns) const {
  std::string text =
      fmt::format("epoch {}{}", last_.epoch, epochs_ > 0 ? fmt::format("/{}", epochs_) : "");
  if (last_loss_) text += fmt::format("  loss {:.4f}", *last_loss_);
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

  const size_t room = static_cast<size_t>(std::max(rows, 1)) - lines.size();
  const bool fit = series_.size() <= room;
  const size_t shown = fit ? series_.size() : room - std::min<size_t>(room, 1);
  constexpr int kValue = 9;
  size_t widest = 0;
  for (const Series& one : series_) widest = std::max(widest, one.name.size());
  const int name = std::min(static_cast<int>(widest), std::max(columns / 3, 1));
  for (size_t i = 0; i < shown; ++i) {
    const Series& one = series_[i];
    const std::string text =
        fmt::format("{:<{}} {:>{}.4g} ", name_in(one.name, name), name, one.values.back(), kValue);
    const int left = columns - 1 - static_cast<int>(text.size());
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
      parts.push_back(fmt::format("{} {:.4g}", spaced(name), value));
    }
    lines.push_back(base::join(parts, "  "));
  }
  if (is_over() && !std::exchange(has_told_end_, true)) lines.push_back(state_text());
  return lines;
}

}  // namespace syncbn::train
