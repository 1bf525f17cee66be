#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Stream.h>

#include <syncbn/data/dataset.h>
#include <syncbn/dist/data_parallel.h>
#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/optimizer.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

/// The memory format of a model and its input: the configured one or, with `auto`, the faster one.
at::MemoryFormat memory_format(const Config& config, const models::Model& model);

/// The configuration's model, with the same parameters on all ranks, on the device of the default
/// process group and in its memory_format(); `freeze` is applied. Afterwards each rank draws its
/// own random numbers.
/// @throws base::UserError on rank 0, QuietExit on the others, when the model does not take the
///   data set's samples or this machine has too little memory.
std::shared_ptr<models::Model> make_model(const Config& config, const data::Dataset& dataset,
                                          int64_t seed);

using Replicas = dist::DataParallel<models::Model>;

/// The model and its replicas on the devices of the section `parallel`; null without it. Every rank
/// calls it.
/// @throws base::UserError on a rank whose device is not the first of them, and for a task whose
///   outputs cannot be divided by samples; QuietExit on the others
std::shared_ptr<Replicas> make_replicas(const Config& config, const data::Dataset& dataset,
                                        const Task& task,
                                        const std::shared_ptr<models::Model>& model);

/// The configuration's task, for this data and network.
/// @throws base::UserError on rank 0, QuietExit on the others, when they do not suit each other
std::unique_ptr<Task> make_task(const Config& config, const data::Dataset& dataset,
                                models::Model& model);

/// Loads the weights of `init` into the model: the parameters on rank 0, from which
/// DistributedDataParallel copies them to the others, and the buffers on all ranks. Every rank
/// calls it.
/// @throws base::UserError on rank 0, QuietExit on the others, when they do not fit
void init_model(const Config& config, models::Model& model);

/// The model's buffers, concatenated: float64, on their device.
at::Tensor packed_buffers(const models::Model& model);
/// packed_buffers() by name, with the shapes and types of the model's buffers.
std::map<std::string, at::Tensor> unpacked_buffers(const at::Tensor& packed,
                                                   const models::Model& model);
void load_buffers(const at::Tensor& packed, models::Model& model);

/// Model::train(), except for layers that freeze_statistics leaves in evaluation mode.
void set_training(const Config& config, models::Model& model);

/// The parameters that require gradients: those that an optimizer updates.
NamedTensors trainable_parameters(const models::Model& model);

/// Parameters and buffers: the model's own tensors, not copies.
std::map<std::string, at::Tensor> state_of(const torch::nn::Module& model);

/// Copies the result of state_of() into a model.
/// @throws base::UserError for other names or shapes; its message calls `saved` "it"
void load_model(const std::map<std::string, at::Tensor>& saved, const models::Model& model);

/// Copies batches to the device, in the form that the network takes. On a GPU it uses its own
/// stream, so that the previous step can still compute.
class BatchToDevice {
 public:
  struct Options {
    at::Device device;
    bool pinned = false;  ///< batches are in pinned memory, so copies can be asynchronous
    at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;  ///< of images
    data::Normalization normalization;                              ///< of images in bytes
    at::ScalarType image_type = at::kFloat;                         ///< of images in bytes
  };

  explicit BatchToDevice(Options options);

  data::Batch operator()(const data::Batch& batch) const;

 private:
  data::Batch prepared(const data::Batch& batch) const;
  at::Tensor moved(const at::Tensor& tensor) const {
    return tensor.to(options_.device, /*non_blocking=*/options_.pinned);
  }

  const Options options_;
  const std::optional<c10::Stream> stream_;  ///< on a GPU
};

/// Copies batches of a data set to the device of the default process group.
/// @param pinned whether its batches are in pinned memory
BatchToDevice batch_to_device(const Config& config, const models::Model& model,
                              const data::Dataset& dataset, bool pinned);

}  // namespace syncbn::train
