// A worker that executes its arguments in order. Over the agent channel: "progress DONE TOTAL
// TEXT", "clear", "garbage BYTES", "heartbeat STEPS", "steps COUNT MILLISECONDS" (heartbeats from 1
// on), "waiting COLLECTIVE NAME", "phase MILLISECONDS TEXT", "timeout MILLISECONDS", "log FILE",
// "resume COMMAND". Others: "print LINE"; "calls COUNT" (in its flight record; the last call stays
// open); "wait" (for a signal); "fail CODE".
#include <fcntl.h>
#include <syncbn/agent.h>
#include <syncbn/base/flight_record.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace {

int channel() {
  const char* fd = std::getenv("SYNCBN_AGENT_FD");
  return fd == nullptr ? -1 : std::atoi(fd);
}

bool send(const void* bytes, size_t size) {
  return ::write(channel(), bytes, size) == static_cast<ssize_t>(size);
}

bool send_record(syncbn_agent_kind kind, uint64_t done, uint64_t total, const char* text) {
  syncbn_agent_record record{};
  record.magic = SYNCBN_AGENT_MAGIC;
  record.version = SYNCBN_AGENT_VERSION;
  record.kind = static_cast<uint16_t>(kind);
  record.rank = std::atoi(std::getenv("RANK"));
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  record.time_ns =
      static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
  record.done = done;
  record.total = total;
  std::snprintf(record.text, sizeof(record.text), "%s", text);
  return send(&record, sizeof(record));
}

}  // namespace

/// Records calls in a group of all ranks.
bool make_calls(uint64_t count) {
  using syncbn::base::FlightRecord;
  const int world_size = std::atoi(std::getenv("WORLD_SIZE"));
  const auto record = FlightRecord::of_process(std::atoi(std::getenv("RANK")), world_size);
  if (!record) return false;
  std::vector<int> all(static_cast<size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  const size_t group = record->add_group("all", all);
  for (uint64_t n = 1; n <= count; ++n) {
    const uint64_t call = record->begin({.kind = "all_reduce",
                                         .dtype = "Float",
                                         .name = "all_reduce",
                                         .sequence = n,
                                         .group = group});
    if (n < count) record->end(call, syncbn::base::FlightLayout::kSucceeded, /*was_awaited=*/false);
  }
  return true;
}

/// Not inlined, so that a debugger shows its name.
[[gnu::noinline]] void wait_for_signal() {
  for (;;) ::pause();
}

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    bool sent = true;
    if (word == "progress" && i + 3 < argc) {
      sent = send_record(SYNCBN_AGENT_PROGRESS, std::strtoull(argv[i + 1], nullptr, 10),
                         std::strtoull(argv[i + 2], nullptr, 10), argv[i + 3]);
      i += 3;
    } else if (word == "heartbeat" && i + 1 < argc) {
      sent = send_record(SYNCBN_AGENT_HEARTBEAT, std::strtoull(argv[++i], nullptr, 10), 0, "");
    } else if (word == "steps" && i + 2 < argc) {
      const uint64_t count = std::strtoull(argv[i + 1], nullptr, 10);
      for (uint64_t step = 1; step <= count; ++step) {
        send_record(SYNCBN_AGENT_HEARTBEAT, step, 0, "");  // a record that does not fit is dropped
        ::usleep(static_cast<useconds_t>(std::atoi(argv[i + 2])) * 1000);
      }
      i += 2;
    } else if ((word == "log" || word == "resume") && i + 1 < argc) {
      sent = send_record(word == "log" ? SYNCBN_AGENT_LOG : SYNCBN_AGENT_RESUME, 0, 0, argv[++i]);
    } else if (word == "timeout" && i + 1 < argc) {
      sent = send_record(SYNCBN_AGENT_TIMEOUT, std::strtoull(argv[++i], nullptr, 10), 0, "");
    } else if ((word == "waiting" || word == "phase") && i + 2 < argc) {
      sent = send_record(word == "phase" ? SYNCBN_AGENT_PHASE : SYNCBN_AGENT_WAITING,
                         std::strtoull(argv[i + 1], nullptr, 10), 0, argv[i + 2]);
      i += 2;
    } else if (word == "clear") {
      sent = send_record(SYNCBN_AGENT_CLEAR, 0, 0, "");
    } else if (word == "garbage" && i + 1 < argc) {
      sent = send(argv[i + 1], std::strlen(argv[i + 1]));
      ++i;
    } else if (word == "print" && i + 1 < argc) {
      std::printf("%s\n", argv[++i]);
      std::fflush(stdout);
    } else if (word == "calls" && i + 1 < argc) {
      sent = make_calls(std::strtoull(argv[++i], nullptr, 10));
    } else if (word == "wait") {
      wait_for_signal();
    } else if (word == "fail" && i + 1 < argc) {
      return std::atoi(argv[i + 1]);
    } else {
      std::fprintf(stderr, "agent_worker: what is '%s'?\n", word.c_str());
      return 99;
    }
    if (!sent) return 98;
  }
  return 0;
}
