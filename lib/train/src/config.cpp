#include <syncbn/base/text.h>
#include <syncbn/train/config.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <cmath>

namespace syncbn::train {
namespace {

constexpr double kMillisecond = 0.001;  // in seconds, as the next
constexpr double kYear = 365.0 * 24 * 3600;

// Upper bounds on options; more is a typing error.
constexpr double kMaxThreads = 1024;  // with many more libgomp hangs
constexpr double kMaxBucketMiB = 1e6;
constexpr double kMaxBatchSize = 1e7;
constexpr double kMaxPrefetch = 1e4;

}  // namespace

void DdpConfig::describe(config::Schema<DdpConfig>& schema) {
  schema.field("broadcast_buffers", &DdpConfig::broadcast_buffers,
               "overwrite all ranks' buffers with rank 0's before each forward");
  schema.field("find_unused_parameters", &DdpConfig::find_unused_parameters,
               "allow parameters without a gradient in a step");
  schema.field("gradient_as_bucket_view", &DdpConfig::gradient_as_bucket_view,
               "keep gradients in the communication buckets: less memory and copying");
  schema
      .field("bucket_cap_mb", &DdpConfig::bucket_cap_mb,
             "size of a gradient bucket; null: 25, and 1 for the first")
      .above(0)
      .at_most(kMaxBucketMiB)
      .unit("MiB");
}

void LoaderConfig::describe(config::Schema<LoaderConfig>& schema) {
  schema
      .field("num_workers", &LoaderConfig::num_workers,
             "loader threads of each rank; auto: the host's cores divided by LOCAL_WORLD_SIZE, "
             "minus one, if samples are decoded, else 0; 0: the training thread loads samples")
      .between(0, kMaxThreads);
  schema.field("prefetch", &LoaderConfig::prefetch, "batches to prepare ahead, at most")
      .between(1, kMaxPrefetch)
      .unit("batches");
  schema.field("pin_memory", &LoaderConfig::pin_memory,
               "put batches into pinned memory, for quicker copies to a GPU; without a GPU it "
               "changes nothing");
  schema.field("drop_last", &LoaderConfig::drop_last,
               "leave out a rank's last training batch if it is smaller");
  schema
      .field("timeout", &LoaderConfig::timeout,
             "how long a step may wait for its batch; 0: no limit")
      .between(0, kYear)
      .unit("s");
  schema
      .field("on_error", &LoaderConfig::on_error,
             "what to do about a damaged sample: raise ends the run, skip leaves the sample out")
      .one_of({"raise", "skip"});
  schema
      .field("error_budget", &LoaderConfig::error_budget,
             "with on_error: skip, the share of a rank's epoch that may be left out")
      .between(0, 1);
}

data::LoaderOptions LoaderConfig::options(int64_t batch_size) const {
  using OnError = data::LoaderOptions::OnError;
  return {.batch_size = batch_size,
          .drop_last = drop_last,
          .num_workers = static_cast<int>(num_workers.value.value_or(data::kAutoWorkers)),
          .prefetch = prefetch,
          .pin_memory = pin_memory,
          // Rounded up, since 0 means no limit.
          .timeout = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(timeout * 1000))),
          .on_error = on_error == "skip" ? OnError::kSkip : OnError::kRaise,
          .error_budget = error_budget};
}

void Config::describe(config::Schema<Config>& schema) {
  schema.field("seed", &Config::seed, "seed of the initial parameters and of the order of samples")
      .at_least(0);
  schema.field("epochs", &Config::epochs, "passes over the training data").between(1, kMaxEpochs);
  schema.field("batch_size", &Config::batch_size, "samples of each rank in a step")
      .between(1, kMaxBatchSize)
      .unit("samples");
  schema
      .field("global_batch_size", &Config::global_batch_size,
             "samples of all ranks in a step, in place of batch_size")
      .between(1, kMaxBatchSize)
      .unit("samples");
  schema.field("model", &Config::model, "the network").required();
  schema.field("sync_batchnorm", &Config::sync_batchnorm,
               "compute batch norm's statistics over all ranks' samples");
  schema
      .field("memory_format", &Config::memory_format,
             "memory format of images; auto: channels_last for convolutions on CPUs, where it is "
             "faster")
      .one_of({"auto", "contiguous", "channels_last"});
  schema.field("data", &Config::data, "the data set").required();
  schema.field("sampler", &Config::sampler, "which training samples a rank sees");
  schema.field("loader", &Config::loader, "");
  schema.field("optimizer", &Config::optimizer, "how parameters are updated");
  schema.field("schedule", &Config::schedule, "how the learning rate changes");
  schema.field("ddp", &Config::ddp, "");
  schema
      .field("eval_interval", &Config::eval_interval,
             "epochs between two evaluations; the last epoch is always evaluated")
      .at_least(1)
      .unit("epochs");
  schema.field("log_interval", &Config::log_interval, "steps between two log lines; 0: none")
      .at_least(0)
      .unit("steps");
  schema.field("run_dir", &Config::run_dir,
               "folder for logs and checkpoints; empty: runs/NAME after the configuration's file, "
               "or runs/NAME-2, -3, ... if that holds a run");
  schema.field("resume", &Config::resume,
               "checkpoint to resume from; auto: run_dir's last.pt if it exists; empty: none");
  schema.field("overwrite", &Config::overwrite, "replace the run that run_dir holds");
  schema.field("backend", &Config::backend, "communication backend; auto: NCCL on GPUs")
      .one_of({"auto", "gloo", "nccl"});
  schema.field("timeout", &Config::timeout, "timeout of every collective")
      .between(kMillisecond, kYear)
      .unit("s");
  schema
      .field("connect_timeout", &Config::connect_timeout, "how long to wait for all ranks to join")
      .between(kMillisecond, kYear)
      .unit("s");
  schema.field("threads", &Config::threads, "compute threads of each rank; 0: OMP_NUM_THREADS")
      .between(0, kMaxThreads);
  schema.check([](const Config& config) -> std::optional<std::string> {
    if (config.batch_size.has_value() != config.global_batch_size.has_value()) return std::nullopt;
    return "set exactly one of batch_size (samples of each rank) and global_batch_size (samples of "
           "all ranks together)";
  });
}

int64_t Config::local_batch_size(int world_size) const {
  if (batch_size) return *batch_size;
  if (!global_batch_size) throw base::InternalError("a configuration without a batch size");
  if (*global_batch_size % world_size != 0) {
    throw base::UserError(
        fmt::format("global_batch_size: {} cannot be divided evenly between {} ranks; "
                    "choose a multiple of {}",
                    base::counted(*global_batch_size, "sample"), world_size, world_size));
  }
  return *global_batch_size / world_size;
}

}  // namespace syncbn::train
