#include "step/model.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/data/batch_transforms.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <syncbn/models/detector.h>
#include <syncbn/models/memory_format.h>
#include <syncbn/models/weights.h>

#include <algorithm>

#include "common/component_error.h"
#include "common/naming.h"
#include "common/out_of_memory.h"
#include "common/rank_0.h"
#include "step/training_step.h"

namespace syncbn::train {

at::MemoryFormat memory_format(const Config& config, const models::Model& model) {
  if (config.memory_format == "channels_last") return at::MemoryFormat::ChannelsLast;
  if (config.memory_format == "contiguous") return at::MemoryFormat::Contiguous;
  return models::preferred_memory_format(model);
}

namespace {

void freeze(const std::vector<std::string>& wildcards, models::Model& model) {
  const auto parameters = model.named_parameters();
  for (const std::string& wildcard : wildcards) {
    bool is_used = false;
    for (const auto& item : parameters) {
      if (!base::matches_name(wildcard, item.key())) continue;
      item.value().set_requires_grad(false);
      is_used = true;
    }
    if (!is_used) throw base::UserError(fmt::format("freeze: '{}' matches no parameter", wildcard));
  }
  const bool is_all = std::ranges::none_of(
      parameters, [](const auto& item) { return item.value().requires_grad(); });
  if (is_all) throw base::UserError("freeze: all parameters are frozen; nothing is left to train");
}

}  // namespace

void init_model(const Config& config, models::Model& model) {
  do_on_rank_0([&] {
    if (config.init.empty()) return;
    naming("init", [&] {
      const std::string file = models::weights_file(config.init);
      const models::StateDict weights = models::read_state_dict(file, config.init_key);
      const auto report = naming(file, [&] {
        return models::load_state_dict(model, weights,
                                       {.skip = config.init_skip,
                                        .into = config.init_into,
                                        .ignore = config.init_ignore,
                                        .prefix = config.init_prefix,
                                        .keys = "init_"});
      });
      const auto part = [](const char* what, const std::vector<std::string>& names) {
        constexpr size_t kShown = 10;
        return names.empty() ? ""
                             : fmt::format("; {}: {}", what, base::join_some(names, ", ", kShown));
      };
      spdlog::info("begins with {} of {}{}{}{}{}", base::counted(report.loaded.size(), "tensor"),
                   file, report.prefix.empty() ? "" : " below " + base::printable(report.prefix),
                   config.init_into.empty() ? "" : " in " + config.init_into,
                   part("random", report.skipped), part("left out", report.unexpected));
    });
  });
  // DistributedDataParallel broadcasts parameters, and buffers only with ddp.broadcast_buffers.
  at::Tensor buffers = packed_buffers(model);
  dist::broadcast(buffers, 0);
  load_buffers(buffers, model);
}

at::Tensor packed_buffers(const models::Model& model) {
  std::vector<at::Tensor> flat = {
      at::empty({0}, at::TensorOptions(at::kDouble).device(dist::device()))};
  for (const at::Tensor& buffer : model.buffers()) flat.push_back(buffer.flatten().to(at::kDouble));
  return at::cat(flat);
}

std::map<std::string, at::Tensor> unpacked_buffers(const at::Tensor& packed,
                                                   const models::Model& model) {
  std::map<std::string, at::Tensor> all;
  int64_t at = 0;
  for (const auto& item : model.named_buffers()) {
    const at::Tensor& buffer = item.value();
    all[item.key()] = packed.narrow(0, at, buffer.numel()).view_as(buffer).to(buffer.options());
    at += buffer.numel();
  }
  return all;
}

void load_buffers(const at::Tensor& packed, models::Model& model) {
  const at::NoGradGuard no_grad;
  auto present = model.named_buffers();
  for (const auto& [name, buffer] : unpacked_buffers(packed, model)) present[name].copy_(buffer);
}

void set_training(const Config& config, models::Model& model) {
  model.train();
  if (!config.freeze_statistics) return;
  for (const auto& module : model.modules()) {
    const auto parameters = module->parameters(/*recurse=*/false);
    const bool is_norm = module->named_buffers(/*recurse=*/false).contains("running_mean");
    const bool is_frozen =
        !parameters.empty() && std::ranges::none_of(parameters, &at::Tensor::requires_grad);
    if (is_norm && is_frozen) module->eval();
  }
}

namespace {

models::ModelArgs model_args(const Config& config, const data::Dataset& dataset) {
  models::ModelArgs args;
  args.num_classes = dataset.num_classes();
  args.sample_shape = dataset.sample_shape();
  args.norm = config.sync_batchnorm ? models::Norm::kSync : models::Norm::kLocal;
  if (config.sync_timeout) args.norm_timeout = milliseconds(*config.sync_timeout);
  args.activation_checkpointing = config.activation_checkpointing;
  return args;
}

/// Lets the torch::nn::BatchNorm layers of a network follow `sync_batchnorm`, as those of
/// models::NormFactory do. Rank 0 warns of layers that cannot.
void synchronise(const Config& config, const models::ModelArgs& args, models::Model& model) {
  if (!config.sync_batchnorm) return;
  const auto report = dist::convert_sync_batchnorm(model, args.norm_group, args.norm_timeout);
  if (!is_rank_0()) return;
  for (const auto& [name, why] : report.not_converted) {
    spdlog::warn("{}: {} keeps the statistics of each rank: {}",
                 component_name("model", config.model), name, why);
  }
}

/// @throws base::UserError for a name that no device has
at::Device device_of(const std::string& name) {
  try {
    return at::Device(name);
  } catch (const std::exception&) {
    throw base::UserError(
        fmt::format("parallel.devices: '{}' is not a device; use cpu, or cuda:N", name));
  }
}

}  // namespace

std::shared_ptr<Replicas> make_replicas(const Config& config, const data::Dataset& dataset,
                                        const Task& task,
                                        const std::shared_ptr<models::Model>& model) {
  if (config.parallel.mode != "data_parallel") return nullptr;
  std::shared_ptr<Replicas> made;
  on_each_rank([&] {
    const bool is_detector = dynamic_cast<const models::Detector*>(model.get()) != nullptr;
    if (task.turns().size() > 1 || is_detector) {
      throw base::UserError(fmt::format(
          "parallel.mode: data_parallel cannot divide what task {} needs by samples; use ddp",
          config.task.type()));
    }
    dist::DataParallelOptions options;
    std::vector<std::shared_ptr<models::Model>> replicas;
    for (const std::string& name : config.parallel.devices) {
      options.device_ids.push_back(device_of(name));
      if (replicas.empty()) {
        replicas.push_back(model);
        continue;
      }
      const models::ModelArgs args = model_args(config, dataset);
      replicas.push_back(config.model.make(args));
      synchronise(config, args, *replicas.back());
    }
    const at::Device first = options.device_ids.front();
    if (first != dist::device() && first.type() == dist::device().type()) {
      throw base::UserError(
          fmt::format("parallel.devices begins with {}, and rank {} is on {}; begin "
                      "with that",
                      first.str(), dist::rank(), dist::device().str()));
    }
    if (config.sync_timeout) options.sync_timeout = milliseconds(*config.sync_timeout);
    made = std::make_shared<Replicas>(replicas, options);
  });
  return made;
}

namespace {

/// Asks a plug-in's network for the outputs of one sample, to find its mistakes before the first
/// step.
void try_out(const Config& config, const models::ModelArgs& args, models::Model& model) {
  std::vector<int64_t> shape = args.sample_shape;
  shape.insert(shape.begin(), 1);
  const at::NoGradGuard no_grad;
  // It may have operators for GPUs only, and is on the CPU, where `train check` also leaves it.
  const std::string backend = config.chosen_backend();
  if (backend == "auto" ? base::count_gpus() > 0 : backend != "gloo") return;
  model.eval();
  const at::Tensor outputs = model.forward(at::zeros(shape));
  model.train();
  if (config.task.type() != "classification") return;
  if (outputs.sizes() == at::IntArrayRef{1, args.num_classes}) return;
  throw base::UserError(
      fmt::format("forward() makes [{}] of one sample, and with the {} classes of the data it has "
                  "to make [1, {}]",
                  fmt::join(outputs.sizes(), ", "), args.num_classes, args.num_classes));
}

std::shared_ptr<models::Model> made_by_plugin(const Config& config, const models::ModelArgs& args) {
  const std::string name = component_name("model", config.model);
  return refusing([&] { return name; },
                  [&] {
                    return naming(name, [&] {
                      return explain_out_of_memory(MemoryUse::kSetup, [&] {
                        auto model = config.model.make(args);
                        if (model == nullptr) throw base::UserError("it is null");
                        try_out(config, args, *model);
                        return model;
                      });
                    });
                  });
}

}  // namespace

std::shared_ptr<models::Model> make_model(const Config& config, const data::Dataset& dataset,
                                          int64_t seed) {
  models::ModelArgs args = model_args(config, dataset);
  if (config.sync_batchnorm && config.sync_batchnorm_group) {
    args.norm_group = dist::new_subgroups(static_cast<int>(*config.sync_batchnorm_group));
  }
  at::manual_seed(static_cast<uint64_t>(seed));
  auto model = report_on_rank_0([&] {
    auto made =
        plugin_of(config.model).empty()
            ? explain_out_of_memory(MemoryUse::kSetup, [&] { return config.model.make(args); })
            : made_by_plugin(config, args);
    synchronise(config, args, *made);
    freeze(config.freeze, *made);
    return made;
  });
  model->to(dist::device());
  models::to_memory_format(*model, memory_format(config, *model));
  at::manual_seed(static_cast<uint64_t>(seed + dist::rank()));
  return model;
}

std::unique_ptr<Task> make_task(const Config& config, const data::Dataset& dataset,
                                models::Model& model) {
  return report_on_rank_0([&] {
    auto task = config.task.make(dataset);
    naming("model " + config.model.type(), [&] { task->attach(model); });
    return task;
  });
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
    throw base::UserError(
        fmt::format("it has {}, the model of this configuration has {}; is it of another model?",
                    base::counted(saved.size(), "tensor"), present.size()));
  }
  for (auto& [name, tensor] : present) {
    const auto found = saved.find(name);
    if (found == saved.end()) throw base::UserError(fmt::format("it has no tensor '{}'", name));
    if (found->second.sizes() != tensor.sizes()) {
      throw base::UserError(fmt::format(
          "its tensor '{}' is {}, the model of this configuration has {}; to begin with its other "
          "weights, set init and init_skip",
          name, c10::str(found->second.sizes()), c10::str(tensor.sizes())));
    }
    tensor.copy_(found->second);
  }
}

BatchToDevice batch_to_device(const Config& config, const models::Model& model,
                              const data::Dataset& dataset, bool pinned) {
  // On GPUs, the type to which autocast would convert images in a kernel before the first
  // convolution.
  const bool is_gpu = dist::device().is_cuda();
  return BatchToDevice(
      {.device = dist::device(),
       .pinned = pinned,
       .memory_format = memory_format(config, model),
       .normalization = dataset.normalization(),
       .image_type = is_gpu ? chosen_precision(config, dist::device()) : at::kFloat});
}

BatchToDevice::BatchToDevice(Options options)
    : options_(std::move(options)),
      stream_(options_.device.is_cuda()
                  ? std::optional(c10::impl::VirtualGuardImpl(options_.device.type())
                                      .getStreamFromGlobalPool(options_.device))
                  : std::nullopt) {}

data::Batch BatchToDevice::operator()(const data::Batch& batch) const {
  if (!stream_) return prepared(batch);
  data::Batch ready;
  {
    const c10::StreamGuard guard(*stream_);
    ready = prepared(batch);
  }
  const c10::impl::VirtualGuardImpl device(options_.device.type());
  const c10::Stream computing = device.getStream(options_.device);
  c10::Event copied(options_.device.type());
  copied.record(*stream_);
  copied.block(computing);
  // The tensors belong to the copying stream, which must not reuse their memory before that time.
  for (const at::Tensor& tensor : {ready.data, ready.target}) tensor.record_stream(computing);
  return ready;
}

data::Batch BatchToDevice::prepared(const data::Batch& batch) const {
  at::Tensor data = moved(batch.data);
  if (data.scalar_type() == at::kByte) {
    const at::Tensor sizes = batch.sizes.defined() ? moved(batch.sizes) : at::Tensor();
    data = data::normalize(data, options_.normalization, sizes,
                           {options_.image_type, options_.memory_format});
  }
  if (data.dim() == 4) data = data.contiguous(options_.memory_format);
  return {std::move(data), moved(batch.target), batch.sizes, batch.indices, batch.randoms};
}

}  // namespace syncbn::train
