#include "records/step_time.h"

#include <syncbn/dist/collectives.h>

#include <cstring>
#include <string>

namespace syncbn::train {

std::vector<StepTime> of_all_ranks(const StepTime& own) {
  std::vector<StepTime> all;
  const std::string bytes(reinterpret_cast<const char*>(&own), sizeof own);
  for (const std::string& part : dist::all_gather_bytes(bytes)) {
    std::memcpy(&all.emplace_back(), part.data(), sizeof own);
  }
  return all;
}

}  // namespace syncbn::train
