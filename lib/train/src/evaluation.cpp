#include "evaluation.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <syncbn/data/sampler.h>
#include <syncbn/dist/process_group.h>

namespace syncbn::train {

SampleSums evaluate(models::Model& model, const std::shared_ptr<const data::Dataset>& dataset,
                    data::LoaderOptions options, const BatchToDevice& to_device) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& buffer : model.buffers()) dist::broadcast(buffer, 0);
  model.eval();
  auto sampler = std::make_shared<data::SequentialShardSampler>(dataset->size(), dist::world_size(),
                                                                dist::rank());
  options.drop_last = false;
  options.on_error = data::LoaderOptions::OnError::kRaise;
  data::Loader loader(dataset, std::move(sampler), options);
  loader.start_epoch(0);
  SampleSums sums;
  while (const auto batch = loader.next()) {
    const at::Tensor logits = model.forward(to_device.input(*batch));
    const at::Tensor target = to_device.target(*batch);
    sums.loss += at::cross_entropy_loss(logits, target, {}, at::Reduction::Sum).item<double>();
    sums.correct += logits.argmax(1).eq(target).sum().item<double>();
    sums.samples += static_cast<double>(batch->size());
  }
  return sums.over_all_ranks();
}

}  // namespace syncbn::train
