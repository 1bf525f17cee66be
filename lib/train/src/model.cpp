#include "model.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/batch_transforms.h>
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

std::shared_ptr<models::Model> make_model(const Config& config, const data::Dataset& dataset,
                                          int64_t seed) {
  models::ModelArgs args;
  args.num_classes = dataset.num_classes();
  args.sample_shape = dataset.sample_shape();
  args.norm = config.sync_batchnorm ? models::Norm::kSync : models::Norm::kLocal;
  if (config.sync_batchnorm && config.sync_batchnorm_group) {
    args.norm_group = dist::new_subgroups(static_cast<int>(*config.sync_batchnorm_group));
  }
  if (config.sync_timeout) args.norm_timeout = milliseconds(*config.sync_timeout);
  args.activation_checkpointing = config.activation_checkpointing;
  at::manual_seed(static_cast<uint64_t>(seed));
  auto model = report_on_rank_0([&] {
    return explain_out_of_memory(MemoryUse::kSetup, [&] { return config.model.make(args); });
  });
  model->to(dist::device());
  models::to_memory_format(*model, memory_format(config, *model));
  at::manual_seed(static_cast<uint64_t>(seed + dist::rank()));
  return model;
}

NamedTensors trainable_parameters(const models::Model& model) {
  NamedTensors all;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad()) all.emplace_back(item.key(), item.value());
  }
  return all;
}

std::map<std::string, at::Tensor> state_of(const torch::nn::Module& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model.named_parameters()) all[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) all[item.key()] = item.value();
  return all;
}

void load_model(const std::map<std::string, at::Tensor>& saved, const models::Model& model) {
  const at::NoGradGuard no_grad;
  auto present = state_of(model);
  if (saved.size() != present.size()) {
    throw base::UserError(fmt::format("it has {}, the model of this configuration has {}",
                                      base::counted(saved.size(), "tensor"), present.size()));
  }
  for (auto& [name, tensor] : present) {
    const auto found = saved.find(name);
    if (found == saved.end()) throw base::UserError(fmt::format("it has no tensor '{}'", name));
    if (found->second.sizes() != tensor.sizes()) {
      throw base::UserError(fmt::format("its tensor '{}' has another shape", name));
    }
    tensor.copy_(found->second);
  }
}

BatchToDevice batch_to_device(const Config& config, const models::Model& model,
                              const data::Dataset& dataset, bool pinned) {
  return BatchToDevice({.device = dist::device(),
                        .pinned = pinned,
                        .memory_format = memory_format(config, model),
                        .normalization = dataset.normalization()});
}

at::Tensor BatchToDevice::input(const data::Batch& batch) const {
  at::Tensor data = moved(batch.data);
  if (data.scalar_type() == at::kByte) data = data::normalize(data, options_.normalization);
  return data.dim() == 4 ? data.contiguous(options_.memory_format) : data;
}

}  // namespace syncbn::train
