// Feeds bytes of a worker to the reader of its agent channel and to all code that uses the records.
#include <syncbn/base/progress_bar.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "job/hang.h"
#include "job/worker_state.h"
#include "require.h"
#include "workers/agent_reader.h"
#include "workers/worker_progress.h"

namespace {

using namespace syncbn::launch;

bool is_printable(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto now = Clock::now();
  WorkerProgress progress;
  syncbn::base::ProgressBar bar;
  AgentReader reader;
  const auto sink = [&](const syncbn_agent_record& record) {
    require(::strnlen(record.text, sizeof(record.text)) < sizeof(record.text));
    require(is_printable(record.text));
    now += std::chrono::milliseconds(100);
    progress.update(record, now);
    bar.update(record, now);
    require(is_printable(bar.draw(80, now)));
  };
  for (size_t begin = 0; begin < size; begin += 100) reader.feed(bytes.substr(begin, 100), sink);
  WorkerState worker{.rank = 0, .host = "a", .pid = 1};
  progress.describe(worker, now);
  WorkerState other = worker;
  other.rank = 1;
  other.steps /= 2;
  require(nlohmann::json(worker).get<WorkerState>().doing == worker.doing);
  judge_hang({worker, other}, 1, true);
  require(!table_of({worker, other}).empty());
  return 0;
}
