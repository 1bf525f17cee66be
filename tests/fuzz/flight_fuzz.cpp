// Feeds bytes to the readers of flight records: of the memory that a rank writes, and of a job's
// file. The first byte selects the reader.
#include <syncbn/base/error.h>
#include <syncbn/base/flight_record.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "job/explain.h"
#include "job/flight_file.h"
#include "job/rank_record.h"
#include "job/worker_state.h"
#include "require.h"

namespace {

using namespace syncbn::launch;
using syncbn::base::FlightLayout;

constexpr int kMaxWorld = 1000;  // longer lists of ranks take longer, but show nothing else

void explain_all(const FlightFile& file) {
  if (file.world_size > kMaxWorld) return;
  for (const char c : explanation({file})) require(c == '\n' || static_cast<uint8_t>(c) >= 0x20);
  const FlightFile again = FlightFile::of(file.text(), "file");
  require(again.records.size() == file.records.size());
  for (const auto& [rank, record] : file.records) require(!torch_pickle(record).empty());
}

void read_file(const std::string& text) {
  may_refuse<syncbn::base::UserError>([&] { explain_all(FlightFile::of(text, "file")); });
}

/// @param bytes a header, 256 bytes of groups, as many bytes of the groups' last calls, and calls
void read_memory(std::string_view bytes) {
  constexpr size_t kGroupBytes = 256;
  const RankMemory memory = RankMemory::make();
  const auto put = [&](size_t place, size_t size) {
    const std::string_view part = bytes.substr(0, size);
    require(::pwrite(memory.fd(), part.data(), part.size(), static_cast<off_t>(place)) ==
            static_cast<ssize_t>(part.size()));
    bytes.remove_prefix(part.size());
  };
  put(0, sizeof(FlightLayout::Header));
  put(offsetof(FlightLayout, groups), kGroupBytes);
  put(offsetof(FlightLayout, last_collectives), kGroupBytes);
  put(offsetof(FlightLayout, calls), sizeof(FlightLayout::calls));
  auto record = read_rank_record(memory.fd());
  if (!record) return;
  WorkerState worker{.rank = record->rank, .host = "a"};
  describe_calls(*record, worker);
  require(nlohmann::json(worker).get<WorkerState>().called == worker.called);
  FlightFile file{.job = "j", .world_size = record->world_size, .why = "fuzz"};
  file.records.emplace(record->rank, std::move(*record));
  explain_all(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  data[0] % 2 == 0 ? read_file(std::string(bytes)) : read_memory(bytes);
  return 0;
}
