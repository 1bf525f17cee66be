#include "records/step_time.h"

#include <syncbn/dist/process_group.h>

#include <span>

#include "common/gathered.h"

namespace syncbn::train {

double OwnTimer::seconds() const {
  const auto now = dist::time_between_calls();
  if (!now || !begin_ || dist::device().is_cuda()) return 0;
  return std::chrono::duration<double>(*now - *begin_).count();
}

std::vector<StepTime> of_all_ranks(const StepTime& own) {
  return gathered(std::span<const StepTime>(&own, 1));
}

}  // namespace syncbn::train
