#include "common/kinds.h"

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>
#include <syncbn/data/transforms.h>
#include <syncbn/models/model_kind.h>
#include <syncbn/train/loss.h>
#include <syncbn/train/metric.h>
#include <syncbn/train/optimizer.h>
#include <syncbn/train/schedule.h>
#include <syncbn/train/task.h>

namespace syncbn::train {
namespace {

template <class Kind>
config::RegistryBase& registry_of() {
  return Kind::registry();
}

constexpr Kind kKinds[] = {
    {"models", registry_of<models::ModelKind>},
    {"data", registry_of<data::DatasetKind>},
    {"transforms", registry_of<data::TransformKind>},
    {"losses", registry_of<LossKind>},
    {"metrics", registry_of<MetricKind>},
    {"tasks", registry_of<TaskKind>},
    {"optimizers", registry_of<OptimizerKind>},
    {"schedules", registry_of<ScheduleKind>},
    {"samplers", registry_of<data::SamplerKind>},
};

}  // namespace

std::span<const Kind> all_kinds() {
  return kKinds;
}

}  // namespace syncbn::train
