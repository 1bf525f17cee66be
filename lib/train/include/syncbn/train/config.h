#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sampler.h>
#include <syncbn/models/model_kind.h>
#include <syncbn/train/optimizer.h>
#include <syncbn/train/schedule.h>

namespace syncbn::train {

/// The section `ddp`: names and defaults of dist::DdpOptions.
struct DdpConfig {
  bool broadcast_buffers = true;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  std::optional<double> bucket_cap_mb;

  static void describe(config::Schema<DdpConfig>& schema);
};

/// The section `loader`: names and defaults of data::LoaderOptions, except for num_workers.
struct LoaderConfig {
  config::OrAuto<int64_t> num_workers;
  int64_t prefetch = 2;
  bool pin_memory = false;
  bool drop_last = false;
  double timeout = 0;
  std::string on_error = "raise";
  double error_budget = 0.05;

  static void describe(config::Schema<LoaderConfig>& schema);

  data::LoaderOptions options(int64_t batch_size) const;
};

/// The configuration of a run. docs/config.md is generated from it.
struct Config {
  int64_t seed = 0;
  int64_t epochs = 10;
  std::optional<int64_t> batch_size;
  std::optional<int64_t> global_batch_size;
  config::Component<models::ModelKind> model;
  bool sync_batchnorm = true;
  std::string memory_format = "auto";
  config::Component<data::DatasetKind> data;
  config::Component<data::SamplerKind> sampler{"distributed"};
  LoaderConfig loader;
  config::Component<OptimizerKind> optimizer{"sgd"};
  config::Component<ScheduleKind> schedule{"constant"};
  DdpConfig ddp;
  int64_t eval_interval = 1;
  int64_t log_interval = 0;
  std::string run_dir;
  std::string resume;
  bool overwrite = false;
  std::string backend = "auto";
  double timeout = 1800;
  double connect_timeout = 300;
  int64_t threads = 0;

  static void describe(config::Schema<Config>& schema);

  /// Samples per step on each of `world_size` ranks.
  /// @throws base::UserError when global_batch_size cannot be divided evenly.
  int64_t local_batch_size(int world_size) const;
};

}  // namespace syncbn::train
