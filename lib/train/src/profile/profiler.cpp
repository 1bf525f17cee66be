#include "profile/profiler.h"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/machine_id.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/process_group.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <system_error>
#include <utility>

#include "common/rank_0.h"
#include "profile/clocks.h"
#include "profile/profile_files.h"
#include "profile/summary.h"
#include "profile/trace_text.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// A gzip file, written from beginning to end.
class GzipFile {
 public:
  /// @param name for messages
  GzipFile(const fs::path& path, const fs::path& name)
      : name_(name), file_(::gzopen(path.c_str(), "wb1")) {
    require(file_ != nullptr);
  }
  ~GzipFile() {
    if (file_ != nullptr) ::gzclose(file_);
  }
  GzipFile(const GzipFile&) = delete;
  GzipFile& operator=(const GzipFile&) = delete;

  void write(const std::string& text) {
    if (text.empty()) return;
    require(::gzwrite(file_, text.data(), static_cast<unsigned>(text.size())) > 0);
  }
  void close() { require(::gzclose(std::exchange(file_, nullptr)) == Z_OK); }

 private:
  void require(bool has_worked) const {
    if (!has_worked) base::throw_file_error("cannot write " + name_.string(), errno);
  }

  const fs::path name_;
  gzFile file_;
};

// Recorded but not used: the first recorded step takes longer.
constexpr int64_t kWarmUpSteps = 1;

// Upper bound on a message: a text is sent in parts, after its size, which the receiver needs to
// know.
constexpr int64_t kMaxPart = 1 << 24;  // bytes

void send_text(const std::string& text, int to) {
  const auto size = static_cast<int64_t>(text.size());
  dist::send(at::scalar_tensor(size, at::kLong), to);
  for (int64_t begin = 0; begin < size; begin += kMaxPart) {
    at::Tensor part = at::empty({std::min(kMaxPart, size - begin)}, at::kByte);
    std::memcpy(part.mutable_data_ptr(), text.data() + begin, part.nbytes());
    dist::send(part, to);
  }
}

void receive_text(int from, const std::function<void(const std::string&)>& add) {
  at::Tensor size = at::zeros({}, at::kLong);
  dist::recv(size, from);
  for (int64_t left = size.item<int64_t>(); left > 0; left -= kMaxPart) {
    at::Tensor part = at::empty({std::min(kMaxPart, left)}, at::kByte);
    dist::recv(part, from);
    add({static_cast<const char*>(part.const_data_ptr()), part.nbytes()});
  }
}

/// On rank 0: writes its own text and the others', of which it holds one part at a time.
void write_trace(const fs::path& path, const std::string& own) {
  int next = 1;
  const auto receive_rest = [&](const std::function<void(const std::string&)>& add) {
    while (next < dist::world_size()) {
      add(",\n");
      receive_text(next++, add);
    }
  };
  // A rank that sends waits for its receiver: receive everything even if the disk fails.
  std::exception_ptr failure;
  try {
    base::write_file_atomically(path, [&](const fs::path& temporary) {
      GzipFile file(temporary, path);
      const auto add = [&](const std::string& text) {
        if (failure) return;
        try {
          file.write(text);
        } catch (const base::Error&) {
          failure = std::current_exception();
        }
      };
      add(R"({"displayTimeUnit":"ms","traceEvents":[)"
          "\n");
      add(own);
      receive_rest(add);
      add("\n]}\n");
      if (failure) std::rethrow_exception(failure);
      file.close();
    });
  } catch (const base::Error&) {
    if (next == 1) receive_rest([](const std::string&) {});
    throw;
  }
}

}  // namespace

Profiler::Profiler(const ProfileConfig& config, const models::Model& model)
    : model_(model), skip_(config.skip), steps_(config.steps) {}

int64_t Profiler::requested(const fs::path& run) {
  constexpr auto kPeriod = std::chrono::seconds(1);
  const auto now = Clock::now();
  if (now - looked_ < kPeriod || steps_ > 0) return 0;  // requests wait for the pending profile
  looked_ = now;
  const fs::path request = ProfileFiles(run).request();
  if (!base::exists(request)) return 0;
  try {
    const auto steps = base::parse_number<int64_t>(base::read_file(request, 100));
    if (steps && *steps > 0 && *steps <= ProfileConfig::kMaxSteps) return *steps;
  } catch (const base::Error&) {
    // The command has withdrawn its request.
  }
  return 0;
}

void Profiler::request(int64_t steps) {
  if (steps == 0 || steps_ > 0) return;
  skip_ = kWarmUpSteps + 1;  // and the rest of the current step
  steps_ = steps;
}

void Profiler::begin_step(int64_t step) {
  if (steps_ == 0 || skip_ > kWarmUpSteps) return;
  if (!recorder_) recorder_ = std::make_unique<Recorder>(model_);
  if (!recorder_->is_running()) recorder_->start();
  if (skip_ == 0 && own_.steps.empty()) {
    own_ = {.rank = dist::rank(), .host = base::hostname(), .first_step = step};
    recorder_->begin_anew();
  }
  step_begin_ = base::unix_ns();
}

bool Profiler::end_step() {
  if (steps_ == 0) return false;
  if (skip_ > 0) {
    --skip_;
    return false;
  }
  own_.steps.push_back({step_begin_, base::unix_ns()});
  return --steps_ == 0;
}

void Profiler::pause() {
  if (recorder_ && recorder_->is_running()) recorder_->stop();
}

std::vector<std::string> Profiler::write(const fs::path& run) {
  pause();
  std::vector<Track> tracks = recorder_->take(own_);
  recorder_.reset();
  steps_ = 0;
  Track steps{.name = "steps"};
  for (const Interval& step : own_.steps) {
    const auto number = own_.first_step + static_cast<int64_t>(steps.spans.size());
    steps.spans.push_back({fmt::format("step {}", number), step});
  }
  tracks.push_back(std::move(steps));
  const RankProfile own = std::exchange(own_, {});

  const std::vector<ClockOffset> clocks = clock_offsets(base::machine_id(), base::unix_ns);
  const auto rank = static_cast<size_t>(dist::rank());
  // The earliest time on all ranks, by rank 0's clock: Perfetto drops events with negative times.
  int64_t earliest = own.steps.front().begin;
  for (const Track& track : tracks) {
    for (const Track::Span& span : track.spans) earliest = std::min(earliest, span.time.begin);
  }
  at::Tensor start = at::scalar_tensor(earliest - clocks[rank].offset, at::kLong);
  dist::all_reduce(start, c10d::ReduceOp::MIN);
  const std::string text =
      trace_text(own.rank, own.host, tracks, start.item<int64_t>() + clocks[rank].offset);
  tracks.clear();
  const std::vector<std::string> gathered = dist::gather_bytes(to_bytes(own), 0);
  if (!is_rank_0()) {
    send_text(text, 0);
    return {};
  }
  const ProfileFiles files(run);
  std::vector<RankProfile> profiles;
  for (const std::string& bytes : gathered) profiles.push_back(rank_profile_of(bytes));
  auto summary = summary_of(profiles, clocks);
  const fs::path trace = files.trace(own.first_step);
  summary["trace"] = trace.lexically_relative(run).string();
  std::vector<std::string> lines = table_of(summary);
  try {
    write_trace(trace, text);
    base::write_file_atomically(files.summary(), summary.dump(1) + "\n");
    lines.push_back(fmt::format("{} opens at https://ui.perfetto.dev", trace.string()));
  } catch (const dist::PeerError&) {
    throw;
  } catch (const base::Error& error) {
    spdlog::warn("the profile was not written, and training goes on: {}", error.what());
  }
  std::error_code ignored;
  fs::remove(files.request(), ignored);
  return lines;
}

}  // namespace syncbn::train
