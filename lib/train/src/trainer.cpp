#include <syncbn/train/trainer.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/data/batch_transforms.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/memory_format.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>

#include "agent_channel.h"
#include "data_wait.h"
#include "out_of_memory.h"
#include "progress.h"
#include "run_folder.h"
#include "step_vote.h"
#include "stop_signals.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Ddp = dist::DistributedDataParallel<models::Model>;

/// Keys that say where and for how long a run goes on, not what it computes.
constexpr std::array<std::string_view, 13> kKeysThatMayChange = {
    "run_dir",         "resume",
    "overwrite",       "epochs",
    "threads",         "timeout",
    "connect_timeout", "backend",
    "log_interval",    "loader.num_workers",
    "loader.prefetch", "loader.pin_memory",
    "loader.timeout"};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Rank 0 does `work` and every rank gets its result. Its error ends all ranks, said by rank 0.
std::string on_rank_0(const std::function<std::string()>& work) {
  // An exit code, and with code 0 the result.
  const auto send = [](int exit_code, const std::string& result) {
    dist::broadcast_bytes(static_cast<char>(exit_code) + result, 0);
  };
  if (dist::rank() != 0) {
    const std::string answer = dist::broadcast_bytes("", 0);
    const int exit_code = static_cast<unsigned char>(answer.at(0));
    if (exit_code != base::kExitOk) throw LeaveSilently{exit_code};
    return answer.substr(1);
  }
  std::string result;
  try {
    result = explain_out_of_memory(MemoryFor::kLater, work);
  } catch (const std::exception& error) {
    try {
      send(base::exit_code_of(error), "");
    } catch (const base::UnavailableError&) {
      // Of a rank that is gone as well; the error at hand came first.
    }
    throw;
  }
  send(base::kExitOk, result);
  return result;
}

void rank_0_does(const std::function<void()>& work) {
  on_rank_0([&] {
    work();
    return std::string();
  });
}

/// For work in which every rank meets the same mistake of the user's: rank 0 says it.
template <class Work>
auto said_once(const Work& work) {
  try {
    return work();
  } catch (const base::UserError& error) {
    if (dist::rank() == 0) throw;
    throw LeaveSilently{error.exit_code()};
  }
}

at::MemoryFormat memory_format(const Config& config, const models::Model& model) {
  if (config.memory_format == "channels_last") return at::MemoryFormat::ChannelsLast;
  if (config.memory_format == "contiguous") return at::MemoryFormat::Contiguous;
  return models::preferred_memory_format(model);
}

std::shared_ptr<models::Model> make_model(const Config& config, const data::Dataset& dataset) {
  models::ModelArgs args;
  args.num_classes = dataset.num_classes();
  args.sample_shape = dataset.sample_shape();
  args.norm = config.sync_batchnorm ? models::Norm::kSync : models::Norm::kLocal;
  // The same on all ranks; afterwards each rank draws numbers of its own.
  const auto seed = static_cast<uint64_t>(config.seed);
  at::manual_seed(seed);
  auto model = said_once([&] {
    return explain_out_of_memory(MemoryFor::kMaking, [&] { return config.model.make(args); });
  });
  model->to(dist::device());
  models::to_memory_format(*model, memory_format(config, *model));
  at::manual_seed(seed + static_cast<uint64_t>(dist::rank()));
  return model;
}

NamedTensors named_parameters(const models::Model& model) {
  NamedTensors all;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad()) all.emplace_back(item.key(), item.value());
  }
  return all;
}

/// Parameters and buffers: the model's own tensors, not copies.
std::map<std::string, at::Tensor> state_of(const models::Model& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model.named_parameters()) all[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) all[item.key()] = item.value();
  return all;
}

void load_model(const std::map<std::string, at::Tensor>& saved, const models::Model& model) {
  const at::NoGradGuard no_grad;
  auto present = state_of(model);
  if (saved.size() != present.size()) {
    throw base::UserError(fmt::format("it has {} tensors, the model of this configuration has {}",
                                      saved.size(), present.size()));
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

/// Sums over samples that make means when divided.
struct Sums {
  double loss = 0;
  double correct = 0;
  double samples = 0;

  /// Over all ranks, in float64: the counts stay exact.
  Sums reduced(at::Device device) const {
    at::Tensor sums = at::empty({3}, at::kDouble);
    double* values = sums.mutable_data_ptr<double>();
    values[0] = loss, values[1] = correct, values[2] = samples;
    sums = sums.to(device);
    dist::all_reduce(sums);
    sums = sums.cpu();
    const double* all = sums.const_data_ptr<double>();
    return {all[0], all[1], all[2]};
  }
};

/// Where the run is; with the tensors this is all that a checkpoint holds.
struct Position {
  int64_t epoch = 0;
  int64_t step = 0;
  double best_accuracy = -1;
  int64_t best_epoch = 0;
  double earlier_seconds = 0;
  Sums earlier_in_epoch;  ///< of all ranks, before the epoch was interrupted
};

class Trainer {
 public:
  Trainer(const Config& config, std::string config_text, const std::string& name,
          const Inputs& inputs)
      : config_(config),
        config_text_(std::move(config_text)),
        name_(name),
        inputs_(inputs),
        device_(dist::device()),
        channel_(dist::rank()),
        progress_(channel_),
        vote_(device_),
        normalization_(inputs.train_set->normalization()),
        loader_(inputs.train_set, inputs.sampler, loader_options()) {
    const std::string resumed = choose_folder_and_read_checkpoint();
    model_ = make_model(config_, *inputs_.train_set);
    memory_format_ = memory_format(config_, *model_);
    optimizer_ = config_.optimizer.make(named_parameters(*model_));
    schedule_ = config_.schedule.make(ScheduleArgs{optimizer_->base_lr(), config_.epochs,
                                                   std::max<int64_t>(loader_.num_batches(), 1)});
    if (!resumed.empty()) said_once([&] { restore(parse_checkpoint(resumed, resume_path_)); });
    ddp_ = std::make_unique<Ddp>(
        model_, dist::DdpOptions{.broadcast_buffers = config_.ddp.broadcast_buffers,
                                 .find_unused_parameters = config_.ddp.find_unused_parameters,
                                 .gradient_as_bucket_view = config_.ddp.gradient_as_bucket_view,
                                 .bucket_cap_mb = config_.ddp.bucket_cap_mb});
    // Last: until all of the above has succeeded, nothing of a former run is touched.
    rank_0_does([&] { start_folder(!resumed.empty()); });
  }

  int run() {
    EpochRecord record;
    for (; position_.epoch < config_.epochs; ++position_.epoch) {
      if (!continues_epoch_) loader_.start_epoch(position_.epoch);
      continues_epoch_ = false;
      if (const int signal = train_epoch(record)) return stop(signal);
      const bool last = position_.epoch + 1 == config_.epochs;
      const bool evaluates = last || (position_.epoch + 1) % config_.eval_interval == 0;
      finish_epoch(record, evaluates);
    }
    if (!record.test_accuracy) evaluate(record);
    finish(record);
    return base::kExitOk;
  }

 private:
  bool is_rank_0() const { return dist::rank() == 0; }

  double seconds() const { return position_.earlier_seconds + seconds_since(begin_); }

  // Beginning.

  data::LoaderOptions loader_options() const {
    data::LoaderOptions options = config_.loader.options(inputs_.batch_size);
    // The loader would say on every rank where there is no GPU.
    options.pin_memory = options.pin_memory && device_.is_cuda();
    return options;
  }

  /// The bytes of the checkpoint to go on from, the same on all ranks; empty: none.
  std::string choose_folder_and_read_checkpoint() {
    return on_rank_0([&]() -> std::string {
      restarted_ = folder_of_attempt_before();
      const bool automatic = config_.resume == "auto";
      const fs::path last = wanted_folder() / "last.pt";
      std::error_code ignored;
      fs::path checkpoint = automatic ? last : fs::path(config_.resume);
      // After a restart the attempt before counts, whatever it went on from itself.
      if (restarted_ && fs::exists(last, ignored)) checkpoint = last;
      if (automatic && !fs::exists(checkpoint, ignored)) checkpoint.clear();
      // Going on with the run of that very folder replaces nothing.
      continues_folder_ = automatic || (!checkpoint.empty() && is_in_wanted_folder(checkpoint));
      folder_path_ = restarted_ ? *restarted_
                                : RunFolder::choose(config_.run_dir, name_, continues_folder_,
                                                    config_.overwrite);
      if (checkpoint.empty()) return "";
      resume_path_ = checkpoint.string();
      std::string bytes = base::read_file(checkpoint);
      parse_checkpoint(bytes, resume_path_);
      return bytes;
    });
  }

  /// Where this run is when the launcher has started the workers again: after a failure, or on
  /// other nodes.
  std::optional<fs::path> folder_of_attempt_before() const {
    const auto attempt = base::env_int("SYNCBN_ATTEMPT", 0, std::numeric_limits<int>::max());
    const auto job = base::env("SYNCBN_JOB_ID");
    if (attempt.value_or(0) == 0 || !job) return std::nullopt;
    return RunFolder::of_job(*job, config_.run_dir, name_);
  }

  bool is_in_wanted_folder(const fs::path& file) const {
    std::error_code error;
    return fs::equivalent(file.has_parent_path() ? file.parent_path() : fs::path("."),
                          wanted_folder(), error);
  }

  fs::path wanted_folder() const {
    if (restarted_) return *restarted_;
    return RunFolder::wanted_path(config_.run_dir, name_);
  }

  /// What of this configuration is not as it was when the checkpoint was made.
  std::vector<std::string> compare_configuration(const Checkpoint& checkpoint) const {
    std::vector<std::string> changed;
    for (const auto& [key, before, after] :
         config::changes(config::parse_yaml(checkpoint.config, resume_path_),
                         config::parse_yaml(config_text_, name_))) {
      if (key == "optimizer.type") {
        throw base::UserError(fmt::format(
            "it was made with optimizer.type {} and this configuration has {}, which cannot use "
            "the former's state; set it back, or begin a new run without --resume",
            before, after));
      }
      if (std::ranges::find(kKeysThatMayChange, key) != kKeysThatMayChange.end()) continue;
      changed.push_back(fmt::format("{} {} (was {})", key, after, before));
    }
    return changed;
  }

  void restore(const Checkpoint& checkpoint) {
    std::vector<std::string> changed;
    try {
      changed = compare_configuration(checkpoint);
      load_model(checkpoint.model, *model_);
      optimizer_->load(checkpoint.optimizer);
      loader_.resume(checkpoint.sampler);
    } catch (const base::UserError& error) {
      throw base::UserError(fmt::format("cannot go on from {}: {}", resume_path_, error.what()));
    }
    if (!changed.empty() && is_rank_0()) {
      spdlog::warn("{} was made with another configuration; the run goes on with {}", resume_path_,
                   base::join(changed, ", "));
    }
    continues_epoch_ = true;
    position_.epoch = checkpoint.sampler.epoch;
    position_.step = checkpoint.step;
    position_.best_accuracy = checkpoint.best_accuracy;
    position_.best_epoch = checkpoint.best_epoch;
    position_.earlier_seconds = checkpoint.seconds;
    position_.earlier_in_epoch = {.loss = checkpoint.epoch_loss,
                                  .samples = static_cast<double>(checkpoint.epoch_samples)};
    const auto rank = static_cast<size_t>(dist::rank());
    if (checkpoint.world_size == dist::world_size() && rank < checkpoint.rng_states.size()) {
      at::Generator generator = at::globalContext().defaultGenerator(device_);
      generator.set_state(checkpoint.rng_states[rank]);
    } else if (is_rank_0()) {
      spdlog::warn("{} is of {} ranks and this run has {}: it goes on, but not bit for bit",
                   resume_path_, checkpoint.world_size, dist::world_size());
    }
  }

  void start_folder(bool resumed) {
    folder_ = std::make_unique<RunFolder>(folder_path_, config_text_, resumed && continues_folder_);
    folder_->log_start(dist::world_size(), position_.step, resumed);
    spdlog::info("{}: {} training and {} test samples, {} rank{} x batch {}, {}, {}", name_,
                 inputs_.train_set->size(), inputs_.test_set->size(), dist::world_size(),
                 dist::world_size() == 1 ? "" : "s", inputs_.batch_size,
                 config_.sync_batchnorm ? "SyncBatchNorm" : "batch norm of each rank",
                 device_.is_cuda() ? "GPU" : "CPU");
    if (config_.loader.pin_memory && !device_.is_cuda()) {
      spdlog::warn("loader.pin_memory changes nothing: this run has no GPU");
    }
    if (resumed) {
      spdlog::info("goes on from {} at epoch {}, step {}", resume_path_, position_.epoch + 1,
                   position_.step);
    }
    spdlog::info("writes to {}", folder_->path().string());
  }

  // Training.

  /// The rest of an epoch. Returns the signal that stops the run, or 0.
  int train_epoch(EpochRecord& record) {
    ddp_->train();
    epoch_sums_ = {};
    data_wait_.start_epoch();
    const auto begin = Clock::now();
    int signal = 0;
    const auto step = [&] {
      const auto batch = loader_.next();
      if (batch) data_wait_.add(loader_.wait_seconds());
      if (batch) signal = train_step(*batch, record);
      return batch && signal == 0;
    };
    bool goes_on = is_first_step_ ? explain_out_of_memory(MemoryFor::kFirstStep, step) : step();
    is_first_step_ = false;
    while (goes_on) goes_on = step();
    const double trained = seconds_since(begin);
    const Sums all = epoch_sums_.reduced(device_);
    epoch_sums_ = {.loss = all.loss + position_.earlier_in_epoch.loss,
                   .samples = all.samples + position_.earlier_in_epoch.samples};
    position_.earlier_in_epoch = {};
    record.epoch = position_.epoch + 1;
    record.step = position_.step;
    record.train_loss = epoch_sums_.samples > 0 ? epoch_sums_.loss / epoch_sums_.samples : 0;
    record.images_per_second = trained > 0 ? all.samples / trained : 0;
    const DataWait::Means wait = longest(data_wait_.of_epoch(trained), device_);
    record.data_wait_seconds = wait.seconds;
    record.data_wait_share = wait.share;
    record.test_loss.reset();
    record.test_accuracy.reset();
    return signal;
  }

  int train_step(const data::Batch& batch, EpochRecord& record) {
    record.lr = schedule_->lr(position_.step);
    ddp_->zero_grad();
    const at::Tensor logits = ddp_->forward(input_of(batch));
    const at::Tensor loss = at::cross_entropy_loss(logits, on_device(batch.target));
    // Before the update, so that a loss that is not finite never reaches the parameters.
    const StepVote::Result vote = vote_.cast(StopSignals::received(), loss);
    const double value = loss.item<double>();
    if (vote.not_finite) give_up(value, record.lr);
    loss.backward();
    optimizer_->step(record.lr);
    ++position_.step;
    epoch_sums_.loss += value * static_cast<double>(batch.size());
    epoch_sums_.samples += static_cast<double>(batch.size());
    show_progress(value);
    return vote.stop_signal;
  }

  /// Pinned memory is copied from while the program goes on.
  at::Tensor on_device(const at::Tensor& tensor) const {
    return tensor.to(device_, /*non_blocking=*/config_.loader.pin_memory);
  }

  /// Images on the device and as the network's filters lie in memory.
  at::Tensor input_of(const data::Batch& batch) const {
    at::Tensor data = on_device(batch.data);
    if (data.scalar_type() == at::kByte) data = data::normalize(data, normalization_);
    return data.dim() == 4 ? data.contiguous(memory_format_) : data;
  }

  [[noreturn]] void give_up(double loss, double lr) {
    if (!is_rank_0()) throw LeaveSilently{base::kExitUsage};
    progress_.clear();
    folder_->log_end("loss is not finite", position_.step);
    std::error_code ignored;
    const std::string last = folder_->last().string();
    throw base::UserError(fmt::format(
        "the loss is not finite on some rank in step {} (epoch {}; {} on rank 0, learning rate "
        "{:.3g}); try a lower learning rate or a warm-up, or look at the data; {}",
        position_.step + 1, position_.epoch + 1, loss, lr,
        fs::exists(last, ignored) ? last + " has the last whole epoch" : "nothing was saved yet"));
  }

  void show_progress(double loss) {
    channel_.heartbeat(static_cast<uint64_t>(position_.step));
    if (!is_rank_0()) return;
    const int64_t total = config_.epochs * loader_.num_batches();
    progress_.show(
        position_.step, total,
        fmt::format("epoch {}/{}  loss {:.4f}", position_.epoch + 1, config_.epochs, loss));
    if (config_.log_interval > 0 && position_.step % config_.log_interval == 0) {
      progress_.clear();
      spdlog::info("step {}/{}  loss {:.4f}  data wait {}", position_.step, total, loss,
                   base::format_seconds(data_wait_.mean_since_last()));
    }
  }

  // Evaluation.

  /// Each test sample once over all ranks, by rank 0's running statistics.
  void evaluate(EpochRecord& record) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& buffer : model_->buffers()) dist::broadcast(buffer, 0);
    model_->eval();
    auto sampler = std::make_shared<data::SequentialShardSampler>(inputs_.test_set->size(),
                                                                  dist::world_size(), dist::rank());
    data::LoaderOptions options = loader_options();
    // Each sample counts, or the figures are of another set.
    options.drop_last = false;
    options.on_error = data::LoaderOptions::OnError::kRaise;
    data::Loader loader(inputs_.test_set, std::move(sampler), options);
    loader.start_epoch(0);
    Sums sums;
    while (const auto batch = loader.next()) {
      const at::Tensor logits = model_->forward(input_of(*batch));
      const at::Tensor target = on_device(batch->target);
      sums.loss += at::cross_entropy_loss(logits, target, {}, at::Reduction::Sum).item<double>();
      sums.correct += logits.argmax(1).eq(target).sum().item<double>();
      sums.samples += static_cast<double>(batch->size());
    }
    const Sums all = sums.reduced(device_);
    record.test_loss = all.loss / all.samples;
    record.test_accuracy = all.correct / all.samples;
  }

  void finish_epoch(EpochRecord& record, bool evaluates) {
    if (evaluates) evaluate(record);
    const bool best = evaluates && *record.test_accuracy > position_.best_accuracy;
    if (best) {
      position_.best_accuracy = *record.test_accuracy;
      position_.best_epoch = record.epoch;
    }
    record.seconds = seconds();
    epoch_sums_ = {};
    data::SamplerState next = loader_.state();
    next.epoch = position_.epoch + 1;
    next.consumed = 0;
    save(next, best);
    rank_0_does([&] { folder_->log_epoch(record); });
    if (!is_rank_0()) return;
    progress_.clear();
    std::string test;
    if (evaluates) {
      test = fmt::format("test accuracy {:6.2f} %  loss {:.4f}  ", 100 * *record.test_accuracy,
                         *record.test_loss);
    }
    spdlog::info(
        "epoch {:{}d}/{}  train loss {:.4f}  {}lr {:.3g}  {:.0f} images/s  "
        "data wait {:.1f} %  {}",
        record.epoch, std::to_string(config_.epochs).size(), config_.epochs, record.train_loss,
        test, record.lr, record.images_per_second, 100 * record.data_wait_share,
        base::format_seconds(record.seconds));
  }

  // Saving and ending.

  /// Every rank calls it: each gives its random number generator's state.
  void save(const data::SamplerState& sampler, bool best) {
    const at::Tensor own = at::globalContext().defaultGenerator(device_).get_state();
    const auto rng_states = dist::all_gather(own.to(device_));
    rank_0_does([&] {
      Checkpoint checkpoint;
      checkpoint.model = state_of(*model_);
      checkpoint.optimizer = optimizer_->state();
      checkpoint.step = position_.step;
      checkpoint.sampler = sampler;
      checkpoint.epoch_loss = epoch_sums_.loss;
      checkpoint.epoch_samples = static_cast<int64_t>(epoch_sums_.samples);
      checkpoint.world_size = dist::world_size();
      checkpoint.rng_states = rng_states;
      checkpoint.best_accuracy = position_.best_accuracy;
      checkpoint.best_epoch = position_.best_epoch;
      checkpoint.seconds = seconds();
      checkpoint.config = config_text_;
      const std::string bytes = serialize(checkpoint);
      base::write_file_atomically(folder_->last(), bytes);
      if (best) base::write_file_atomically(folder_->best(), bytes);
    });
  }

  int stop(int signal) {
    save(loader_.state(), /*best=*/false);
    rank_0_does([&] { folder_->log_end(fmt::format("signal {}", signal), position_.step); });
    if (is_rank_0()) {
      progress_.clear();
      spdlog::warn("stopped by signal {} after step {}; go on with --run_dir {} --resume auto",
                   signal, position_.step, folder_->path().string());
    }
    return base::kExitSignalBase + signal;
  }

  void finish(EpochRecord& record) {
    record.seconds = seconds();
    if (record.epoch == 0) record.epoch = position_.epoch, record.step = position_.step;
    rank_0_does([&] {
      folder_->log_end("finished", position_.step);
      folder_->write_result({.best_test_accuracy = position_.best_accuracy,
                             .best_epoch = position_.best_epoch,
                             .last = record,
                             .world_size = dist::world_size(),
                             .seed = config_.seed,
                             .sync_batchnorm = config_.sync_batchnorm});
    });
    if (!is_rank_0()) return;
    progress_.clear();
    spdlog::info("test accuracy {:.2f} %, best {:.2f} % (epoch {}), in {}",
                 100 * *record.test_accuracy, 100 * position_.best_accuracy, position_.best_epoch,
                 base::format_seconds(record.seconds));
  }

  const Config& config_;
  const std::string config_text_;
  const std::string name_;
  const Inputs& inputs_;
  const Clock::time_point begin_ = Clock::now();
  const StopSignals signals_;
  const at::Device device_;
  AgentChannel channel_;
  Progress progress_;
  StepVote vote_;
  const data::Normalization normalization_;
  data::Loader loader_;
  std::shared_ptr<models::Model> model_;
  at::MemoryFormat memory_format_ = at::MemoryFormat::Contiguous;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<Ddp> ddp_;
  std::optional<fs::path> restarted_;  ///< rank 0's only
  fs::path folder_path_;
  std::unique_ptr<RunFolder> folder_;  ///< rank 0's only
  std::string resume_path_;
  bool continues_folder_ = false;
  bool continues_epoch_ = false;
  bool is_first_step_ = true;
  DataWait data_wait_;
  Position position_;
  Sums epoch_sums_;
};

}  // namespace

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
        "data: type {} has labels of pixels, and train classifies whole images; use another type",
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
        "loader.drop_last: a rank has {} samples an epoch, less than one batch of {}, so there "
        "would be nothing to train on; take a smaller batch or drop_last: false",
        inputs.sampler->size(), inputs.batch_size));
  }
  return inputs;
}

int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs) {
  auto trainer = explain_out_of_memory(MemoryFor::kMaking,
                                       [&] { return Trainer(config, config_text, name, inputs); });
  return explain_out_of_memory(MemoryFor::kLater, [&] { return trainer.run(); });
}

}  // namespace syncbn::train
