// Times what the flight recorder adds to a collective: the records of begin, wait and end.
#include <benchmark/benchmark.h>
#include <syncbn/base/flight_record.h>
#include <syncbn/base/unique_fd.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>

namespace {

using syncbn::base::FlightLayout;
using syncbn::base::FlightRecord;

void record_call(benchmark::State& state) {
  const syncbn::base::UniqueFd fd(::memfd_create("bench", MFD_CLOEXEC));
  FlightRecord::prepare(fd.get());
  const auto record = FlightRecord::make(fd.get(), 0, 2);
  const size_t group = record->add_group("0", {0, 1});
  const std::array<int64_t, 2> sizes{1, 132};
  uint64_t sequence = 0;
  for (auto _ : state) {
    const uint64_t number =
        record->begin({.kind = "_all_gather_base",
                       .dtype = "Double",
                       .name = "SyncBatchNorm layer 'layer1.0.bn1' (64 channels, Float): exchange",
                       .sequence = ++sequence,
                       .group = group,
                       .sizes = sizes.data(),
                       .dimensions = sizes.size()});
    record->await(number);
    record->end(number, FlightLayout::kSucceeded, /*was_awaited=*/true);
  }
}
BENCHMARK(record_call);

}  // namespace

BENCHMARK_MAIN();
