#include "make_model.h"

#include <ATen/Context.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/memory_format.h>

#include "out_of_memory.h"
#include "rank_0.h"

namespace syncbn::train {

at::MemoryFormat memory_format(const Config& config, const models::Model& model) {
  if (config.memory_format == "channels_last") return at::MemoryFormat::ChannelsLast;
  if (config.memory_format == "contiguous") return at::MemoryFormat::Contiguous;
  return models::preferred_memory_format(model);
}

std::shared_ptr<models::Model> make_model(const Config& config, const data::Dataset& dataset) {
  models::ModelArgs args;
  args.num_classes = dataset.num_classes();
  args.sample_shape = dataset.sample_shape();
  args.norm = config.sync_batchnorm ? models::Norm::kSync : models::Norm::kLocal;
  // The same on all ranks; afterwards each rank draws numbers of its own.
  const auto seed = static_cast<uint64_t>(config.seed);
  at::manual_seed(seed);
  auto model = said_once([&] {
    return explain_out_of_memory(MemoryFor::kMaking, [&] { return config.model.make(args); });
  });
  model->to(dist::device());
  models::to_memory_format(*model, memory_format(config, *model));
  at::manual_seed(seed + static_cast<uint64_t>(dist::rank()));
  return model;
}

}  // namespace syncbn::train
