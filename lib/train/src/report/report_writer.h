#pragma once

#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <thread>

namespace syncbn::train {

/// Writes a run's report.html again and again while training goes on, in a thread of lowest
/// priority. Warns of the first error only; errors end nothing. Not thread-safe.
class ReportWriter {
 public:
  explicit ReportWriter(std::filesystem::path folder);
  /// Writes the report that was asked for last, if it is not written yet.
  ~ReportWriter();
  ReportWriter(const ReportWriter&) = delete;
  ReportWriter& operator=(const ReportWriter&) = delete;

  /// Asks for a report of what the folder holds now. Returns at once. Requests in quick succession
  /// share a report: except for the last one, writing takes a fiftieth of the time at most.
  void renew();

 private:
  void run();
  void write();

  const std::filesystem::path folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_wanted_ = false;
  bool is_closing_ = false;
  bool has_failed_ = false;  ///< used by the thread only
  std::thread thread_;
};

}  // namespace syncbn::train
