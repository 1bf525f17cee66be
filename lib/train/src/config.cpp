#include <syncbn/base/text.h>
#include <syncbn/train/config.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <cmath>
#include <string_view>

namespace syncbn::train {
namespace {

constexpr double kMillisecond = 0.001;  // seconds, as kYear
constexpr double kYear = 365.0 * 24 * 3600;

// Upper bounds on options: anything above is a typo.
constexpr double kMaxThreads = 1024;  // libgomp hangs with many more
constexpr double kMaxBucketMiB = 1e6;
constexpr double kMaxBatchSize = 1e7;
constexpr double kMaxCount = 1e4;  // of batches ahead, parts of a batch and kept checkpoints
constexpr double kMaxSteps = 1e15;
constexpr double kMaxThreadBlocks = 64;  // NCCL's MAXCHANNELS

constexpr std::string_view kGpu = "cuda";

/// N of "cuda:N".
std::optional<int64_t> gpu_of(std::string_view device) {
  constexpr int64_t kMaxGpus = 1024;
  if (!device.starts_with(kGpu) || device.substr(kGpu.size(), 1) != ":") return std::nullopt;
  const auto index = base::parse_number<int64_t>(device.substr(kGpu.size() + 1));
  return index && *index >= 0 && *index < kMaxGpus ? index : std::nullopt;
}

bool is_gpu(std::string_view device) {
  return device == kGpu || gpu_of(device);
}

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
      .positive_up_to(kMaxBucketMiB)
      .unit("MiB");
  schema.field("static_graph", &DdpConfig::static_graph,
               "every step uses the same parameters: finds unused ones without a search per step");
  schema
      .field("comm_hook", &DdpConfig::comm_hook,
             "how gradients are sent: as they are, in 16 bits, or by PowerSGD in low rank")
      .one_of({"none", "fp16", "bf16", "power_sgd"});
}

void NcclConfig::describe(config::Schema<NcclConfig>& schema) {
  schema.field("high_priority", &NcclConfig::high_priority,
               "run NCCL's calls ahead of the kernels of other streams");
  schema
      .field("min_ctas", &NcclConfig::min_ctas,
             "thread blocks of a call, at least; null: NCCL chooses")
      .between(1, kMaxThreadBlocks);
  schema
      .field("max_ctas", &NcclConfig::max_ctas,
             "thread blocks of a call, at most: fewer leave more of the GPU to kernels beside it; "
             "null: NCCL chooses")
      .between(1, kMaxThreadBlocks);
  schema.field("blocking", &NcclConfig::blocking,
               "NCCL's functions return when they are done; otherwise libtorch polls");
  schema.field("register_buckets", &NcclConfig::register_buckets,
               "register the memory of DDP's gradient buckets with NCCL, which then copies less");
  schema.check([](const NcclConfig& nccl) -> std::optional<std::string> {
    if (!nccl.min_ctas || !nccl.max_ctas || *nccl.min_ctas <= *nccl.max_ctas) return std::nullopt;
    return fmt::format("min_ctas: {} is above max_ctas: {}", *nccl.min_ctas, *nccl.max_ctas);
  });
}

void ParallelConfig::describe(config::Schema<ParallelConfig>& schema) {
  schema
      .field(
          "mode", &ParallelConfig::mode,
          "ddp: a rank is one device; data_parallel: each rank divides its batches over replicas "
          "of the network in its process")
      .one_of({"ddp", "data_parallel"});
  schema.field("devices", &ParallelConfig::devices,
               "with data_parallel, a device for each replica: cpu, or cuda:N; cpu may be given "
               "several times");
  schema.check([](const ParallelConfig& parallel) -> std::optional<std::string> {
    if ((parallel.mode == "ddp") == parallel.devices.empty()) return std::nullopt;
    return parallel.devices.empty() ? "mode data_parallel needs devices, such as [cpu, cpu]"
                                    : "devices are for mode data_parallel";
  });
}

void ClipConfig::describe(config::Schema<ClipConfig>& schema) {
  schema
      .field("norm", &ClipConfig::norm,
             "scale gradients so that the norm of all together is at most this; null: off")
      .above(0)
      .other_names({"max_norm", "grad_clip", "clip_grad", "clip_grad_norm"});
  schema
      .field("value", &ClipConfig::value,
             "limit each element of the gradients to at most this; null: off")
      .above(0);
  schema
      .field("adaptive", &ClipConfig::adaptive,
             "limit the norm of each unit's gradient to this share of its weights' norm; null: off")
      .above(0);
  schema.check([](const ClipConfig& clip) -> std::optional<std::string> {
    std::vector<std::string> set;
    if (clip.norm) set.push_back(fmt::format("norm {}", *clip.norm));
    if (clip.value) set.push_back(fmt::format("value {}", *clip.value));
    if (clip.adaptive) set.push_back(fmt::format("adaptive {}", *clip.adaptive));
    if (set.size() < 2) return std::nullopt;
    return fmt::format("{} do not work together; set all but one to null",
                       base::join(set, " and "));
  });
}

void ScalerConfig::describe(config::Schema<ScalerConfig>& schema) {
  schema.field("init_scale", &ScalerConfig::init_scale, "the loss's factor at the start").above(0);
  schema
      .field("growth_factor", &ScalerConfig::growth_factor,
             "factor after growth_interval steps without an overflow")
      .above(1);
  schema.field("backoff_factor", &ScalerConfig::backoff_factor, "factor after an overflow")
      .above(0)
      .below(1);
  schema
      .field("growth_interval", &ScalerConfig::growth_interval,
             "steps without an overflow before the scale rises")
      .at_least(1)
      .unit("steps");
}

void EmaConfig::describe(config::Schema<EmaConfig>& schema) {
  schema
      .field("decay", &EmaConfig::decay,
             "share of the average that an update keeps, such as 0.9999; 0: no average")
      .fraction();
  schema.field("every", &EmaConfig::every, "steps between two updates").at_least(1).unit("steps");
  schema
      .field("start", &EmaConfig::start,
             "until then (5, 0.5ep, 2000step) the average is a copy, as torchvision's during the "
             "warm-up")
      .between(0, kMaxEpochs)
      .unit("epochs");
}

void EarlyStopConfig::describe(config::Schema<EarlyStopConfig>& schema) {
  schema
      .field("patience", &EarlyStopConfig::patience,
             "end the run after so many evaluations without a better result; 0: off")
      .at_least(0)
      .unit("evaluations");
  schema.field("min_delta", &EarlyStopConfig::min_delta, "a smaller improvement does not count")
      .at_least(0);
}

void KeepBestConfig::describe(config::Schema<KeepBestConfig>& schema) {
  schema.field("metric", &KeepBestConfig::metric,
               "what the best checkpoint is chosen by: a metric of the task, with ema_ before it "
               "that of the average, or loss; empty: the task's first metric");
  schema
      .field("mode", &KeepBestConfig::mode,
             "whether its highest or its lowest value is the best; auto: as is usual for it")
      .one_of({"auto", "max", "min"});
  schema
      .field("count", &KeepBestConfig::count,
             "how many of the best to keep: best.pt and best-STEP.pt; 0: none")
      .between(0, kMaxCount);
}

void CheckpointConfig::describe(config::Schema<CheckpointConfig>& schema) {
  schema.field("every", &CheckpointConfig::every,
               "time between two checkpoints: epochs (1ep), steps (500step) or minutes (15min); "
               "the end of the run is always saved");
  schema
      .field(
          "on", &CheckpointConfig::on,
          "who writes the run's folder: rank 0 of the job, or local rank 0 of each node, so that "
          "no node's disk is needed to resume; nodes that share a disk write once")
      .one_of({"job", "node"});
  schema
      .field("keep_last", &CheckpointConfig::keep_last,
             "how many of the last checkpoints to keep: last.pt and step-STEP.pt")
      .between(1, kMaxCount);
  schema.field("keep_best", &CheckpointConfig::keep_best, "");
}

void TensorboardConfig::describe(config::Schema<TensorboardConfig>& schema) {
  schema
      .field("histograms", &TensorboardConfig::histograms,
             "epochs between two histograms of each parameter and its gradient; 0: none")
      .at_least(0)
      .unit("epochs");
}

void ProfileConfig::describe(config::Schema<ProfileConfig>& schema) {
  schema
      .field("skip", &ProfileConfig::skip,
             "steps before the first that is recorded, counted from the start of the program: the "
             "first ones are slower")
      .between(0, train::kMaxSteps)
      .unit("steps");
  schema
      .field("steps", &ProfileConfig::steps,
             "steps to record on all ranks, for a trace and a table of the slowest layers; 0: none")
      .between(0, ProfileConfig::kMaxSteps)
      .unit("steps");
}

void LoaderConfig::describe(config::Schema<LoaderConfig>& schema) {
  schema
      .field("num_workers", &LoaderConfig::num_workers,
             "loader threads of each rank; auto: the host's cores divided by LOCAL_WORLD_SIZE, "
             "minus one, if samples are decoded, else 0; 0: the training thread loads samples")
      .between(0, kMaxThreads)
      .other_names({"workers"});
  schema.field("prefetch", &LoaderConfig::prefetch, "batches to prepare ahead, at most")
      .between(1, kMaxCount)
      .unit("batches");
  schema.field("pin_memory", &LoaderConfig::pin_memory,
               "put batches into pinned memory, for quicker copies to a GPU; auto: with a GPU, "
               "without one it changes nothing");
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
             "with on_error: skip, the share of an epoch, of all ranks together, that may be left "
             "out; above 0, up to 5 samples may be, but no more than half, and never all")
      .between(0, 1);
}

data::LoaderOptions LoaderConfig::options(int64_t batch_size, at::Device device) const {
  using OnError = data::LoaderOptions::OnError;
  return {
      .batch_size = batch_size,
      .drop_last = drop_last,
      .num_workers = static_cast<int>(num_workers.value.value_or(data::kAutoWorkers)),
      .prefetch = prefetch,
      .pin_memory = device.is_cuda() && pin_memory.value.value_or(true),
      // Rounded up: 0 would mean no limit.
      .timeout = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(timeout * 1000))),
      .on_error = on_error == "skip" ? OnError::kSkip : OnError::kRaise,
      // A rank's batch may be empty when others' are not: all ranks take the step.
      .empty_batches = true,
      .error_budget = error_budget,
      .on_error_advice = "`train check` names such samples, loader.on_error: skip leaves them out",
      .budget_name = "loader.error_budget"};
}

void Config::describe(config::Schema<Config>& schema) {
  schema.field("plugins", &Config::plugins,
               "libraries to load first, with networks, data sets, and so on of your own, such as "
               "build/libmine.so (docs/extending.md)");
  schema
      .field(
          "seed", &Config::seed,
          "seed of the initial parameters and of the order of samples; costs no time; on GPUs, "
          "equal runs also need `deterministic`, which is slower; null: drawn, and recorded in the "
          "run's config.yaml")
      .at_least(0);
  schema.field("epochs", &Config::epochs, "passes over the training data")
      .between(1, kMaxEpochs)
      .other_names({"num_epochs", "max_epochs"});
  schema
      .field("start_epoch", &Config::start_epoch,
             "epochs that count as done when a run begins: the schedule and the order of samples "
             "start behind them; where a checkpoint is resumed, its position counts")
      .at_least(0)
      .unit("epochs");
  schema.field("batch_size", &Config::batch_size, "samples of each rank in a step")
      .other_names({"batch", "bs"})
      .between(1, kMaxBatchSize)
      .unit("samples");
  schema
      .field("global_batch_size", &Config::global_batch_size,
             "samples of all ranks in a step, in place of batch_size")
      .between(1, kMaxBatchSize)
      .unit("samples");
  schema
      .field("accumulate", &Config::accumulate,
             "parts of a rank's batch that go through the network one after the other, to save "
             "memory; batch norm sees one part at a time")
      .between(1, kMaxCount);
  schema.field("max_steps", &Config::max_steps, "end the run after so many steps; null: no limit")
      .between(1, kMaxSteps)
      .unit("steps");
  schema.field("max_time", &Config::max_time,
               "save and leave (exit code 85) this long after the job was started: 11h, 50min; "
               "null: no limit");
  schema.field("model", &Config::model, "the network").required();
  schema
      .field("init", &Config::init,
             "weights to begin with: a file of torch.save or safetensors, or the folder of a run; "
             "empty: random values")
      .other_names({"pretrained", "weights"});
  schema.field(
      "init_key", &Config::init_key,
      "the key of the network to take from a file with several: ema for the moving average of a "
      "run, model_ema for that of torchvision's reference; empty: the network itself");
  schema.field(
      "init_into", &Config::init_into,
      "the part of the network that takes the weights, such as backbone.body for those of a "
      "classifier; weights that the part lacks are left out; empty: the whole network");
  schema.field("init_prefix", &Config::init_prefix,
               "what comes before the network's names in the file, such as MoCo's encoder_q; names "
               "without it are left out; empty: found if all names after one prefix fit");
  schema.field("init_skip", &Config::init_skip,
               "names that keep their random values, such as fc for another number of classes "
               "(wildcards)");
  schema.field("init_ignore", &Config::init_ignore,
               "names in the file that are left out, such as criterion (wildcards)");
  schema.field("freeze", &Config::freeze,
               "names of parameters that are not trained, such as conv1 or layer1.* (wildcards)");
  schema.field("freeze_statistics", &Config::freeze_statistics,
               "frozen batch norm layers keep their running statistics, and use them in training");
  schema.field("task", &Config::task, "what the network is trained for");
  schema.field("metrics", &Config::metrics,
               "metrics of evaluations besides the task's, such as {type: top_k, k: 3} "
               "(train --list metrics)");
  schema.field("sync_batchnorm", &Config::sync_batchnorm,
               "compute batch norm's statistics over all ranks' samples");
  schema
      .field("sync_batchnorm_group", &Config::sync_batchnorm_group,
             "successive ranks that share statistics; null: all")
      .at_least(1)
      .unit("ranks");
  schema
      .field("sync_timeout", &Config::sync_timeout,
             "timeout of an exchange of batch norm's statistics; null: that of every collective")
      .between(kMillisecond, kYear)
      .unit("s");
  schema
      .field(
          "distribute_bn", &Config::distribute_bn,
          "batch norm's running statistics ahead of an evaluation: broadcast rank 0's, reduce to "
          "the mean of all ranks, or none: each rank evaluates with its own")
      .one_of({"broadcast", "reduce", "none"});
  schema
      .field(
          "update_bn_stats", &Config::update_bn_stats,
          "training batches of each rank from which batch norm's running statistics are computed "
          "anew ahead of an evaluation; 0: off")
      .at_least(0)
      .unit("batches");
  schema.field("activation_checkpointing", &Config::activation_checkpointing,
               "keep no activations inside a network's blocks, and compute them again in the "
               "backward pass: less memory, about a third more time");
  schema
      .field("memory_format", &Config::memory_format,
             "memory format of images; auto: channels_last for convolutions, where it is faster")
      .one_of({"auto", "contiguous", "channels_last"});
  schema.field("data", &Config::data, "the data set").required();
  schema
      .field("val_fraction", &Config::val_fraction,
             "share of each class of the training samples that is held out to choose the best "
             "checkpoint by; 0: none")
      .fraction();
  schema.field("sampler", &Config::sampler, "which training samples a rank sees");
  schema.field("loader", &Config::loader, "");
  schema.field("optimizer", &Config::optimizer, "how parameters are updated");
  schema.field("schedule", &Config::schedule, "how the learning rate changes");
  schema
      .field("amp", &Config::amp,
             "mixed precision: convolutions and matrix products in bf16 or fp16, with a scaler for "
             "fp16; auto: bf16 on GPUs that have it, none on CPUs")
      .one_of({"auto", "none", "bf16", "fp16"});
  schema.field("scaler", &Config::scaler, "");
  schema.field("clip", &Config::clip, "");
  schema.field("ema", &Config::ema, "");
  schema
      .field("on_nan", &Config::on_nan,
             "what to do when a rank's loss is not finite: stop with exit code 75, skip the step, "
             "or restore the last checkpoint with a lower learning rate")
      .one_of({"stop", "skip", "restore"});
  schema
      .field("restore_lr", &Config::restore_lr,
             "with on_nan: restore, the learning rate's factor each time")
      .positive_up_to(1);
  schema.field("ddp", &Config::ddp, "");
  schema.field("parallel", &Config::parallel, "");
  schema
      .field("eval_interval", &Config::eval_interval,
             "epochs between two evaluations; the last epoch is always evaluated")
      .at_least(1)
      .unit("epochs");
  schema.field("early_stop", &Config::early_stop, "");
  schema
      .field(
          "log_interval", &Config::log_interval,
          "steps between two lines about steps, in log.jsonl too; 0: none; auto: 10 in log.jsonl, "
          "and where there is no terminal a line every 30 s")
      .at_least(0)
      .unit("steps");
  schema.field("report", &Config::report,
               "write the page report.html to the run's folder after evaluations");
  schema.field("tensorboard", &Config::tensorboard, "");
  schema.field("profile", &Config::profile, "");
  schema
      .field("run_dir", &Config::run_dir,
             "folder for logs and checkpoints; empty: runs/NAME after the configuration's file, "
             "or runs/NAME-2, -3, ... if that holds a run")
      .other_names({"output_dir", "out_dir"});
  schema.field("resume", &Config::resume,
               "checkpoint to resume from, or the folder of a run; auto: run_dir's last.pt if it "
               "exists; empty: none");
  schema.field("overwrite", &Config::overwrite, "replace the run that run_dir holds");
  schema.field("checkpoint", &Config::checkpoint, "");
  schema.field("deterministic", &Config::deterministic,
               "use deterministic algorithms only, and fail where there is none");
  schema.field(
      "cudnn_benchmark", &Config::cudnn_benchmark,
      "let cuDNN measure which algorithm is the fastest; auto: unless images differ in size "
      "or deterministic is set");
  schema.field("tf32", &Config::tf32,
               "let GPUs multiply float32 in TF32, with 10 bits of precision");
  schema.field(
      "device", &Config::device,
      "where to train, auto, cpu, cuda or cuda:N; auto: on GPUs if there is one for each rank; "
      "cuda: on GPUs, or fail. A rank has the GPU of its local rank among CUDA_VISIBLE_DEVICES, or "
      "with cuda:N, for one rank on a host, the one of that number");
  schema
      .field("backend", &Config::backend,
             "communication backend; auto: NCCL on GPUs; gloo with device cuda: several ranks may "
             "share a GPU")
      .one_of({"auto", "gloo", "nccl"});
  schema.field("timeout", &Config::timeout, "timeout of every collective")
      .between(kMillisecond, kYear)
      .unit("s");
  schema
      .field("connect_timeout", &Config::connect_timeout, "how long to wait for all ranks to join")
      .between(kMillisecond, kYear)
      .unit("s");
  schema.field("nccl", &Config::nccl, "");
  schema
      .field("threads", &Config::threads,
             "compute threads of each rank; 0: OMP_NUM_THREADS, or one if the network is so small "
             "that several would be slower")
      .between(0, kMaxThreads);
  schema.refuse(
      "accumulate and ddp.static_graph do not work together; set accumulate to 1, or "
      "ddp.static_graph to false",
      [](const Config& config) { return config.accumulate != 1 && config.ddp.static_graph; });
  schema.refuse(
      "activation_checkpointing and ddp.find_unused_parameters do not work together: the "
      "parameters of what is computed again count as unused; set one of them to false",
      [](const Config& config) {
        return config.activation_checkpointing && config.ddp.find_unused_parameters;
      });
  schema.refuse(
      "activation_checkpointing and parallel.mode data_parallel do not work together; set "
      "activation_checkpointing to false, or parallel.mode to ddp",
      [](const Config& config) {
        return config.activation_checkpointing && config.parallel.mode != "ddp";
      });
  schema.check([](const Config& config) -> std::optional<std::string> {
    const auto& limit = config.max_time;
    if (!limit || limit->unit == config::Duration::Unit::kSeconds) return std::nullopt;
    return fmt::format(
        "max_time: expected a time, such as 50min, got {}; to limit steps or epochs, set max_steps "
        "or epochs",
        limit->str());
  });
  schema.check([](const Config& config) -> std::optional<std::string> {
    if (config.start_epoch < config.epochs) return std::nullopt;
    return fmt::format("start_epoch: {} leaves nothing of epochs: {}", config.start_epoch,
                       config.epochs);
  });
  schema.check([](const Config& config) -> std::optional<std::string> {
    const std::string& device = config.device;
    if (device == "auto" || device == "cpu" || is_gpu(device)) return std::nullopt;
    return fmt::format("device: must be auto, cpu, cuda or cuda:N, got {}", device);
  });
  schema.refuse(
      "device: cpu does not go with backend: nccl, which is for GPUs; set only one",
      [](const Config& config) { return config.device == "cpu" && config.backend == "nccl"; });
  schema.refuse(
      "set exactly one of batch_size (samples of each rank) and global_batch_size (samples of all "
      "ranks together); the other is null",
      [](const Config& config) {
        return config.batch_size.has_value() == config.global_batch_size.has_value();
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

std::optional<int64_t> Config::gpu() const {
  return gpu_of(device);
}

std::string Config::chosen_backend() const {
  if (device == "cpu") return "gloo";
  if (!is_gpu(device)) return backend;
  return backend == "gloo" ? "cuda:gloo" : "nccl";
}

}  // namespace syncbn::train
