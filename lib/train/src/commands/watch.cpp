#include "commands/commands.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "commands/program_options.h"
#include "commands/run_view.h"

namespace syncbn::train {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(500);
constexpr int kPipeColumns = 100;  // where there is no terminal
constexpr int kAllRows = 1000;

/// Returns false if the terminal or the reader of the pipe has gone.
bool print(const std::string& text) {
  return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() &&
         std::fflush(stdout) == 0;
}

int watch_on_terminal(RunView& view, bool colours) {
  size_t drawn = 0;
  winsize former{};
  for (;; view.update()) {
    winsize size{};
    // The terminal may be gone.
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return base::kExitOk;
    const bool is_resized = size.ws_col != former.ws_col || size.ws_row != former.ws_row;
    former = size;
    const int columns = size.ws_col > 0 ? size.ws_col : 80;
    const int rows = size.ws_row > 0 ? size.ws_row : 24;
    // Another width has wrapped the former lines: clears the screen.
    std::string text = drawn == 0   ? ""
                       : is_resized ? "\x1b[H\x1b[2J"
                                    : fmt::format("\x1b[{}A", drawn);
    // The cursor stays on the line below.
    const std::vector<std::string> lines = view.screen(columns, rows - 1, colours);
    for (const std::string& line : lines) text += "\r\x1b[K" + line + "\n";
    if (!print(text + "\x1b[J")) return base::kExitOk;
    drawn = lines.size();
    if (view.is_over()) return base::kExitOk;
    std::this_thread::sleep_for(kPeriod);
  }
}

int watch_in_lines(RunView& view, bool colours) {
  if (!print(base::join(view.screen(kPipeColumns, kAllRows, colours), "\n") + "\n")) {
    return base::kExitOk;
  }
  view.news();  // all of it is on the screen
  while (!view.is_over()) {
    std::this_thread::sleep_for(kPeriod);
    view.update();
    for (const std::string& line : view.news()) {
      if (!print(line + "\n")) return base::kExitOk;
    }
  }
  return base::kExitOk;
}

}  // namespace

int watch(const std::vector<std::string>& args) {
  if (args.empty() || args[0].empty() || args[0].starts_with('-')) {
    throw base::UserError("watch: name the folder of a run first: train watch runs/NAME");
  }
  config::Faults faults;
  const auto line = parse_arguments("watch", {args.begin() + 1, args.end()}, faults);
  faults.throw_if_any();
  const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  const bool colours = colours_of(line).value_or(is_terminal && !base::env("NO_COLOR"));
  RunView view(args[0]);
  return is_terminal ? watch_on_terminal(view, colours) : watch_in_lines(view, colours);
}

}  // namespace syncbn::train
