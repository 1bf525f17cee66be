#include <syncbn/base/text.h>
#include <syncbn/train/config.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <cmath>

namespace syncbn::train {
namespace {

constexpr double kMillisecond = 0.001;  // seconds, as is the next
constexpr double kYear = 365.0 * 24 * 3600;
constexpr double kMostThreads = 1024;   // a typing error above; libgomp then hangs
constexpr double kMostEpochs = 1e6;     // so that steps can be counted in an int64_t
constexpr double kLargestBucket = 1e6;  // MiB
constexpr double kMostSamples = 1e7;    // of a step
constexpr double kMostPrefetch = 1e4;   // batches

std::optional<std::string> one_batch_size(const Config& config) {
  if (config.batch_size.has_value() == config.global_batch_size.has_value()) {
    return "set exactly one of batch_size (samples of each rank) and global_batch_size (samples of "
           "all ranks together)";
  }
  return std::nullopt;
}

}  // namespace

void DdpConfig::describe(config::Schema<DdpConfig>& schema) {
  schema.field("broadcast_buffers", &DdpConfig::broadcast_buffers,
               "overwrite all ranks' buffers by rank 0's before each forward");
  schema.field("find_unused_parameters", &DdpConfig::find_unused_parameters,
               "let parameters get no gradient in some step");
  schema.field("gradient_as_bucket_view", &DdpConfig::gradient_as_bucket_view,
               "let gradients lie in the communication buckets: less memory and copying");
  schema
      .field("bucket_cap_mb", &DdpConfig::bucket_cap_mb,
             "size of a gradient bucket; null: 25, and 1 for the first")
      .above(0)
      .at_most(kLargestBucket)
      .unit("MiB");
}

void LoaderConfig::describe(config::Schema<LoaderConfig>& schema) {
  schema
      .field("num_workers", &LoaderConfig::num_workers,
             "threads of each rank that make samples; auto: where samples are decoded, the host's "
             "cores divided by LOCAL_WORLD_SIZE, less one; 0: the thread that trains makes them")
      .at_least(0)
      .at_most(kMostThreads);
  schema.field("prefetch", &LoaderConfig::prefetch, "batches that are made ahead, at most")
      .at_least(1)
      .at_most(kMostPrefetch)
      .unit("batches");
  schema.field("pin_memory", &LoaderConfig::pin_memory,
               "batches in memory that a GPU copies from directly; without a GPU it changes "
               "nothing");
  schema.field("drop_last", &LoaderConfig::drop_last,
               "leave out a rank's last training batch if it is smaller");
  schema
      .field("timeout", &LoaderConfig::timeout,
             "how long a step waits for its batch; 0: as long as it takes")
      .at_least(0)
      .at_most(kYear)
      .unit("s");
  schema
      .field("on_error", &LoaderConfig::on_error,
             "what a damaged sample does: raise ends the run, skip leaves the sample out")
      .one_of({"raise", "skip"});
  schema
      .field("error_budget", &LoaderConfig::error_budget,
             "with on_error: skip, the share of a rank's epoch that may be left out")
      .at_least(0)
      .at_most(1);
}

data::LoaderOptions LoaderConfig::options(int64_t batch_size) const {
  using OnError = data::LoaderOptions::OnError;
  return {.batch_size = batch_size,
          .drop_last = drop_last,
          .num_workers = static_cast<int>(num_workers.value.value_or(data::kAutoWorkers)),
          .prefetch = prefetch,
          .pin_memory = pin_memory,
          // Up, since 0 would be no limit.
          .timeout = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(timeout * 1000))),
          .on_error = on_error == "skip" ? OnError::kSkip : OnError::kRaise,
          .error_budget = error_budget};
}

void Config::describe(config::Schema<Config>& schema) {
  schema.field("seed", &Config::seed, "of the initial parameters and of the order of samples")
      .at_least(0);
  schema.field("epochs", &Config::epochs, "passes over the training data")
      .at_least(1)
      .at_most(kMostEpochs);
  schema.field("batch_size", &Config::batch_size, "samples of each rank in a step")
      .at_least(1)
      .at_most(kMostSamples)
      .unit("samples");
  schema
      .field("global_batch_size", &Config::global_batch_size,
             "samples of all ranks in a step, in place of batch_size")
      .at_least(1)
      .at_most(kMostSamples)
      .unit("samples");
  schema.field("model", &Config::model, "the network").required();
  schema.field("sync_batchnorm", &Config::sync_batchnorm,
               "take batch norm's statistics over all ranks' samples");
  schema
      .field("memory_format", &Config::memory_format,
             "how images lie in memory; auto: channels_last for convolutions on CPUs, where it is "
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
             "evaluate after every so many epochs, and after the last")
      .at_least(1)
      .unit("epochs");
  schema.field("log_interval", &Config::log_interval, "a log line every so many steps; 0: none")
      .at_least(0)
      .unit("steps");
  schema.field("run_dir", &Config::run_dir,
               "folder for logs and checkpoints; empty: runs/NAME after the configuration's file, "
               "with -2, -3, ... where that holds a run");
  schema.field("resume", &Config::resume,
               "a checkpoint to go on from; auto: run_dir's last.pt if it is there; empty: none");
  schema.field("overwrite", &Config::overwrite, "replace the run that run_dir holds");
  schema.field("backend", &Config::backend, "what ranks communicate by; auto: NCCL on GPUs")
      .one_of({"auto", "gloo", "nccl"});
  schema.field("timeout", &Config::timeout, "of every exchange between ranks")
      .at_least(kMillisecond)
      .at_most(kYear)
      .unit("s");
  schema.field("connect_timeout", &Config::connect_timeout, "for all ranks to find each other")
      .at_least(kMillisecond)
      .at_most(kYear)
      .unit("s");
  schema
      .field("threads", &Config::threads,
             "threads of each rank for computing; 0: as OMP_NUM_THREADS says")
      .at_least(0)
      .at_most(kMostThreads);
  schema.check(one_batch_size);
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
