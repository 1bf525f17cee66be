#include "progress.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/log.h>
#include <syncbn/base/terminal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace syncbn::train {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);

std::string bar(int64_t done, int64_t total, const std::string& text, int columns) {
  const std::string left = fmt::format("{:3d}% [", total > 0 ? 100 * done / total : 0);
  const std::string right = fmt::format("] {}", text);
  const int room = columns - 1 - static_cast<int>(left.size() + right.size());
  const int width = std::clamp(room, 0, 40);
  const int filled = total > 0 ? static_cast<int>(width * done / total) : 0;
  const std::string line = left + std::string(static_cast<size_t>(filled), '#') +
                           std::string(static_cast<size_t>(width - filled), '.') + right;
  return line.substr(0, static_cast<size_t>(std::max(columns - 1, 0)));
}

}  // namespace

// Under a launcher of any kind stderr may be a terminal that other ranks write to as well.
Progress::Progress(AgentChannel& channel)
    : channel_(channel),
      draws_(!channel && !base::env("LOCAL_RANK") && ::isatty(STDERR_FILENO) == 1) {}

void Progress::show(int64_t done, int64_t total, const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  if (done < total && now - last_ < kInterval) return;
  last_ = now;
  channel_.progress(static_cast<uint64_t>(done), static_cast<uint64_t>(total), text);
  if (!draws_) return;
  base::write_stderr("\r\x1b[K" + bar(done, total, text, base::terminal_columns()));
  drawn_ = true;
}

void Progress::clear() {
  channel_.clear();
  if (!drawn_) return;
  base::write_stderr("\r\x1b[K");
  drawn_ = false;
}

}  // namespace syncbn::train
