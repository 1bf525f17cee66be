#include "records/step_time.h"

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <cstring>
#include <string>

namespace syncbn::train {

double OwnTimer::seconds() const {
  const auto now = dist::time_between_calls();
  if (!now || !begin_ || dist::device().is_cuda()) return 0;
  return std::chrono::duration<double>(*now - *begin_).count();
}

std::vector<StepTime> of_all_ranks(const StepTime& own) {
  std::vector<StepTime> all;
  const std::string bytes(reinterpret_cast<const char*>(&own), sizeof own);
  for (const std::string& part : dist::all_gather_bytes(bytes)) {
    std::memcpy(&all.emplace_back(), part.data(), sizeof own);
  }
  return all;
}

}  // namespace syncbn::train
