#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

Inputs load_inputs(const Config& config, int rank, int world_size) {
  Inputs inputs;
  inputs.batch_size = config.local_batch_size(world_size);
  inputs.train_set = config.data.make(data::Split::kTrain);
  inputs.test_set = config.data.make(data::Split::kTest);
  if (inputs.test_set->size() == 0) {
    throw base::UserError("data: the test split is empty; there is nothing to evaluate on");
  }
  const auto* samples = dynamic_cast<const data::SampleDataset*>(inputs.train_set.get());
  if (samples != nullptr && !samples->target_shape().empty()) {
    throw base::UserError(fmt::format(
        "data: type {} has labels of pixels, but train classifies whole images; use another type",
        config.data.type()));
  }
  inputs.sampler =
      config.sampler.make(data::SamplerArgs{.size = inputs.train_set->size(),
                                            .labels = inputs.train_set->labels(),
                                            .num_replicas = world_size,
                                            .rank = rank,
                                            .seed = config.seed,
                                            .shard_ends = inputs.train_set->shard_ends()});
  if (config.loader.drop_last && inputs.sampler->size() < inputs.batch_size) {
    throw base::UserError(fmt::format(
        "loader.drop_last: a rank has {} per epoch, less than one batch of {}, so there "
        "would be nothing to train on; take a smaller batch or drop_last: false",
        base::counted(inputs.sampler->size(), "sample"), inputs.batch_size));
  }
  return inputs;
}

}  // namespace syncbn::train
