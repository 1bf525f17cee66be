#include "report/report_writer.h"

#include <syncbn/base/log.h>
#include <syncbn/train/report.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <utility>

namespace syncbn::train {

using Clock = std::chrono::steady_clock;

ReportWriter::ReportWriter(std::filesystem::path folder)
    : folder_(std::move(folder)), thread_([this] { run(); }) {}

ReportWriter::~ReportWriter() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void ReportWriter::renew() {
  {
    const std::lock_guard lock(mutex_);
    is_wanted_ = true;
  }
  changed_.notify_one();
}

void ReportWriter::run() {
  constexpr int kLowest = 19;
  constexpr int kShare = 50;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLowest);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_wanted_ || is_closing_; });
    if (!std::exchange(is_wanted_, false)) return;
    const auto begin = Clock::now();
    lock.unlock();
    write();
    lock.lock();
    const auto pause = (Clock::now() - begin) * (kShare - 1);
    changed_.wait_for(lock, pause, [&] { return is_closing_; });
  }
}

void ReportWriter::write() {
  try {
    write_report(folder_);
  } catch (const std::exception& error) {
    if (std::exchange(has_failed_, true)) return;
    spdlog::warn("no report: {}; the run goes on", error.what());
  }
}

}  // namespace syncbn::train
