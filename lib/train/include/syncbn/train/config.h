#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/duration.h>
#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sampler.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/model_kind.h>
#include <syncbn/train/metric.h>
#include <syncbn/train/optimizer.h>
#include <syncbn/train/schedule.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

/// The section `ddp`: names and defaults of dist::DdpOptions.
struct DdpConfig {
  bool broadcast_buffers = true;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  std::optional<double> bucket_cap_mb;
  bool static_graph = false;
  std::string comm_hook = "none";

  static void describe(config::Schema<DdpConfig>& schema);
};

/// The section `nccl`.
struct NcclConfig : dist::NcclOptions {
  static void describe(config::Schema<NcclConfig>& schema);
};

/// The section `parallel`: how a rank uses several devices.
struct ParallelConfig {
  std::string mode = "ddp";
  std::vector<std::string> devices;  ///< of data_parallel's replicas

  static void describe(config::Schema<ParallelConfig>& schema);
};

/// The section `clip`; an unset limit does not clip.
struct ClipConfig {
  std::optional<double> norm;
  std::optional<double> value;
  std::optional<double> adaptive;

  static void describe(config::Schema<ClipConfig>& schema);
};

/// The section `scaler`: names and defaults of torch.amp.GradScaler.
struct ScalerConfig {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;

  static void describe(config::Schema<ScalerConfig>& schema);
};

/// The section `ema`.
struct EmaConfig {
  double decay = 0;  ///< 0: no average
  int64_t every = 1;
  config::EpochsOrSteps start = {};

  static void describe(config::Schema<EmaConfig>& schema);
};

/// The section `early_stop`.
struct EarlyStopConfig {
  int64_t patience = 0;  ///< 0: off
  double min_delta = 0;

  static void describe(config::Schema<EarlyStopConfig>& schema);
};

/// The section `checkpoint.keep_best`.
struct KeepBestConfig {
  std::string metric;  ///< empty: the task's first
  std::string mode = "auto";
  int64_t count = 1;

  static void describe(config::Schema<KeepBestConfig>& schema);
};

/// The section `checkpoint`.
struct CheckpointConfig {
  config::Duration every = config::Duration::epochs(1);
  std::string on = "job";
  int64_t keep_last = 1;
  KeepBestConfig keep_best;

  static void describe(config::Schema<CheckpointConfig>& schema);
};

/// The section `profile`: the steps to record.
struct ProfileConfig {
  /// Upper bound on `steps`: a step of a large network has 10^4 operators of 1 kB each.
  static constexpr int64_t kMaxSteps = 20;

  int64_t skip = 10;
  int64_t steps = 0;  ///< 0: none

  static void describe(config::Schema<ProfileConfig>& schema);
};

/// The section `tensorboard`.
struct TensorboardConfig {
  int64_t histograms = 0;  ///< 0: none

  static void describe(config::Schema<TensorboardConfig>& schema);
};

/// The section `loader`: names and defaults of data::LoaderOptions, except for num_workers.
struct LoaderConfig {
  config::OrAuto<int64_t> num_workers;
  int64_t prefetch = 2;
  config::OrAuto<bool> pin_memory;
  bool drop_last = false;
  double timeout = 0;
  std::string on_error = "raise";
  double error_budget = 0.05;

  static void describe(config::Schema<LoaderConfig>& schema);

  data::LoaderOptions options(int64_t batch_size, at::Device device) const;
};

/// Converts seconds, the unit of times in configurations.
inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// The configuration of a run. docs/config.md is generated from it.
struct Config {
  std::vector<std::string> plugins;
  std::optional<int64_t> seed = 0;
  int64_t epochs = 10;
  int64_t start_epoch = 0;
  std::optional<int64_t> max_steps;
  std::optional<config::Duration> max_time;
  std::optional<int64_t> batch_size;
  std::optional<int64_t> global_batch_size;
  int64_t accumulate = 1;
  config::Component<models::ModelKind> model;
  config::Component<TaskKind> task{"classification"};
  std::vector<config::Component<MetricKind>> metrics;
  bool sync_batchnorm = true;
  std::optional<int64_t> sync_batchnorm_group;
  std::optional<double> sync_timeout;
  std::string distribute_bn = "broadcast";
  int64_t update_bn_stats = 0;
  bool activation_checkpointing = false;
  std::string init;
  std::string init_key;
  std::string init_into;
  std::string init_prefix;
  std::vector<std::string> init_skip;
  std::vector<std::string> init_ignore;
  std::vector<std::string> freeze;
  bool freeze_statistics = false;
  std::string memory_format = "auto";
  config::Component<data::DatasetKind> data;
  double val_fraction = 0;
  config::Component<data::SamplerKind> sampler{"distributed"};
  LoaderConfig loader;
  config::Component<OptimizerKind> optimizer{"sgd"};
  config::Component<ScheduleKind> schedule{"constant"};
  std::string amp = "auto";
  ScalerConfig scaler;
  ClipConfig clip;
  EmaConfig ema;
  std::string on_nan = "stop";
  double restore_lr = 0.5;
  DdpConfig ddp;
  ParallelConfig parallel;
  int64_t eval_interval = 1;
  EarlyStopConfig early_stop;
  config::OrAuto<int64_t> log_interval;
  bool report = true;
  TensorboardConfig tensorboard;
  ProfileConfig profile;
  std::string run_dir;
  std::string resume;
  bool overwrite = false;
  CheckpointConfig checkpoint;
  bool deterministic = false;
  config::OrAuto<bool> cudnn_benchmark;
  bool tf32 = false;
  std::string device = "auto";
  std::string backend = "auto";
  double timeout = 1800;
  double connect_timeout = 300;
  NcclConfig nccl;
  int64_t threads = 0;

  static void describe(config::Schema<Config>& schema);

  /// Samples per step on each of `world_size` ranks.
  /// @throws base::UserError when global_batch_size cannot be divided evenly.
  int64_t local_batch_size(int world_size) const;

  /// The GPU that `device: cuda:N` names, among those that this process sees.
  std::optional<int64_t> gpu() const;

  /// The backend for dist::init_process_group() that `device` and `backend` together choose.
  std::string chosen_backend() const;
};

}  // namespace syncbn::train
