#pragma once

#include <syncbn/train/optimizer.h>
#include <syncbn/train/schedule.h>

namespace syncbn::train {

void add_sgd(OptimizerKind::Registry& registry);
void add_adam(OptimizerKind::Registry& registry);  ///< adam and adamw
void add_rmsprop(OptimizerKind::Registry& registry);
void add_lamb(OptimizerKind::Registry& registry);

void add_onecycle(ScheduleKind::Registry& registry);
void add_plateau(ScheduleKind::Registry& registry);

}  // namespace syncbn::train
