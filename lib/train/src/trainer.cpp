#include <syncbn/train/trainer.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sampler.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <utility>

#include "metrics.h"
#include "model.h"
#include "out_of_memory.h"
#include "progress.h"
#include "rank_0.h"
#include "resume.h"
#include "run_folder.h"
#include "stopping.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Ddp = dist::DistributedDataParallel<models::Model>;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

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
        loader_(inputs.train_set, inputs.sampler, loader_options()),
        resume_(find_resume_state(config, name)),
        model_(make_model(config, *inputs.train_set)),
        to_device_({.device = device_,
                    .pinned = loader_options().pin_memory,
                    .memory_format = memory_format(config, *model_),
                    .normalization = inputs.train_set->normalization()}),
        optimizer_(config.optimizer.make(trainable_parameters(*model_))),
        schedule_(config.schedule.make(ScheduleArgs{optimizer_->base_lr(), config.epochs,
                                                    std::max<int64_t>(loader_.num_batches(), 1)})) {
    // The checkpoint is as large as the model: this releases it after the constructor.
    const std::string resumed = std::exchange(resume_.checkpoint, {});
    if (!resumed.empty()) {
      report_on_rank_0([&] { restore(parse_checkpoint(resumed, resume_.checkpoint_path)); });
    }
    ddp_ = std::make_unique<Ddp>(
        model_, dist::DdpOptions{.broadcast_buffers = config_.ddp.broadcast_buffers,
                                 .find_unused_parameters = config_.ddp.find_unused_parameters,
                                 .gradient_as_bucket_view = config_.ddp.gradient_as_bucket_view,
                                 .bucket_cap_mb = config_.ddp.bucket_cap_mb});
    // Last, since this removes the files of an earlier run.
    do_on_rank_0([&] { start_folder(!resumed.empty()); });
  }

  int run() {
    EpochRecord record;
    int64_t& epoch = position_.sampler.epoch;
    for (; epoch < config_.epochs; ++epoch) {
      if (!continues_epoch_) loader_.start_epoch(epoch);
      continues_epoch_ = false;
      if (const int signal = train_epoch(record)) return stop(signal);
      const bool last = epoch + 1 == config_.epochs;
      const bool evaluates = last || (epoch + 1) % config_.eval_interval == 0;
      finish_epoch(record, evaluates);
    }
    if (!record.test_accuracy) evaluate(record);
    finish(record);
    return base::kExitOk;
  }

 private:
  double seconds() const { return position_.seconds + seconds_since(begin_); }

  data::LoaderOptions loader_options() const {
    data::LoaderOptions options = config_.loader.options(inputs_.batch_size);
    // Without a GPU the loader of every rank would warn. start_folder() warns once.
    options.pin_memory = options.pin_memory && device_.is_cuda();
    return options;
  }

  void restore(Checkpoint checkpoint) {
    std::vector<std::string> changed;
    try {
      changed = changed_settings(config::parse_yaml(checkpoint.config, resume_.checkpoint_path),
                                 config::parse_yaml(config_text_, name_));
      load_model(checkpoint.model, *model_);
      optimizer_->load(checkpoint.optimizer);
      loader_.resume(checkpoint.sampler);
    } catch (const base::UserError& error) {
      throw base::UserError(
          fmt::format("cannot resume from {}: {}", resume_.checkpoint_path, error.what()));
    }
    if (!changed.empty() && is_rank_0()) {
      spdlog::warn("{} was made with another configuration; the run continues with {}",
                   resume_.checkpoint_path, base::join(changed, ", "));
    }
    const auto rank = static_cast<size_t>(dist::rank());
    if (checkpoint.world_size == dist::world_size() && rank < checkpoint.rng_states.size()) {
      at::Generator generator = at::globalContext().defaultGenerator(device_);
      generator.set_state(checkpoint.rng_states[rank]);
    } else if (is_rank_0()) {
      spdlog::warn("{} is of {} and this run has {}: it continues, but not bit for bit",
                   resume_.checkpoint_path, base::counted(checkpoint.world_size, "rank"),
                   dist::world_size());
    }
    checkpoint.model.clear();
    checkpoint.optimizer.clear();
    checkpoint.rng_states.clear();
    position_ = std::move(checkpoint);
    saved_step_ = position_.step;
    continues_epoch_ = true;
  }

  void start_folder(bool resumed) {
    const bool continues = resumed && resume_.continues_folder;
    folder_ = std::make_unique<RunFolder>(resume_.folder, config_text_, continues);
    if (continues && !position_.epoch_line.empty()) folder_->complete_log(position_.epoch_line);
    folder_->log_start(dist::world_size(), position_.step, resumed);
    spdlog::info("{}: {} training and {}, {} x batch {}, {}, {}", name_, inputs_.train_set->size(),
                 base::counted(inputs_.test_set->size(), "test sample"),
                 base::counted(dist::world_size(), "rank"), inputs_.batch_size,
                 config_.sync_batchnorm ? "SyncBatchNorm" : "batch norm of each rank",
                 device_.is_cuda() ? "GPU" : "CPU");
    if (config_.loader.pin_memory && !device_.is_cuda()) {
      spdlog::warn("loader.pin_memory changes nothing: this run has no GPU");
    }
    if (resumed) {
      spdlog::info("resumes from {} at epoch {}, step {}", resume_.checkpoint_path,
                   position_.sampler.epoch + 1, position_.step);
    }
    spdlog::info("writes to {}", folder_->path().string());
  }

  /// Trains the rest of an epoch. Returns the signal that stops the run, or 0.
  int train_epoch(EpochRecord& record) {
    ddp_->train();
    epoch_sums_ = {};
    data_wait_.start_epoch();
    // A run that resumes after the epoch's last step has no step left to set it.
    record.lr = schedule_->lr(std::max<int64_t>(position_.step - 1, 0));
    const auto begin = Clock::now();
    int signal = 0;
    const auto step = [&] {
      const auto batch = loader_.next();
      if (batch) data_wait_.add(loader_.wait_seconds());
      if (batch) signal = train_step(*batch, record);
      return batch && signal == 0;
    };
    bool continues = is_first_step_ ? explain_out_of_memory(MemoryUse::kFirstStep, step) : step();
    is_first_step_ = false;
    while (continues) continues = step();
    const double trained = seconds_since(begin);
    const SampleSums all = epoch_sums_.over_all_ranks();
    epoch_sums_ = {.loss = all.loss + position_.epoch_loss,
                   .samples = all.samples + static_cast<double>(position_.epoch_samples)};
    position_.epoch_loss = 0;
    position_.epoch_samples = 0;
    record.epoch = position_.sampler.epoch + 1;
    record.step = position_.step;
    record.train_loss = epoch_sums_.samples > 0 ? epoch_sums_.loss / epoch_sums_.samples : 0;
    record.images_per_second = trained > 0 ? all.samples / trained : 0;
    const DataWait::Means wait = longest(data_wait_.of_epoch(trained));
    record.data_wait_seconds = wait.seconds;
    record.data_wait_share = wait.share;
    record.test_loss.reset();
    record.test_accuracy.reset();
    return signal;
  }

  int train_step(const data::Batch& batch, EpochRecord& record) {
    record.lr = schedule_->lr(position_.step);
    ddp_->zero_grad();
    const at::Tensor logits = ddp_->forward(to_device_.input(batch));
    const at::Tensor loss = at::cross_entropy_loss(logits, to_device_.target(batch));
    // Ahead of the update, so that a loss that is not finite never reaches the parameters.
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

  [[noreturn]] void give_up(double loss, double lr) {
    if (!is_rank_0()) throw QuietExit{base::kExitUsage};
    progress_.clear();
    folder_->log_end("loss is not finite", position_.step);
    std::error_code ignored;
    const std::string last = folder_->last().string();
    throw base::UserError(fmt::format(
        "the loss is not finite on some rank in step {} (epoch {}; {} on rank 0, learning rate "
        "{:.3g}); try a lower learning rate or a warm-up, or look at the data; {}",
        position_.step + 1, position_.sampler.epoch + 1, loss, lr,
        fs::exists(last, ignored) ? fmt::format("{} holds the run after step {}", last, saved_step_)
                                  : "nothing was saved yet"));
  }

  void show_progress(double loss) {
    channel_.heartbeat(static_cast<uint64_t>(position_.step));
    if (!is_rank_0()) return;
    const int64_t total = config_.epochs * loader_.num_batches();
    progress_.show(
        position_.step, total,
        fmt::format("epoch {}/{}  loss {:.4f}", position_.sampler.epoch + 1, config_.epochs, loss));
    if (config_.log_interval > 0 && position_.step % config_.log_interval == 0) {
      progress_.clear();
      spdlog::info("step {}/{}  loss {:.4f}  data wait {}", position_.step, total, loss,
                   base::format_seconds(data_wait_.mean_since_last()));
    }
  }

  /// Evaluates each test sample once, divided between the ranks, with rank 0's running statistics.
  void evaluate(EpochRecord& record) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& buffer : model_->buffers()) dist::broadcast(buffer, 0);
    model_->eval();
    data::LoaderOptions options = loader_options();
    options.drop_last = false;
    options.on_error = data::LoaderOptions::OnError::kRaise;
    data::Loader loader(inputs_.test_set,
                        std::make_shared<data::SequentialShardSampler>(
                            inputs_.test_set->size(), dist::world_size(), dist::rank()),
                        options);
    loader.start_epoch(0);
    SampleSums sums;
    while (const auto batch = loader.next()) {
      const at::Tensor logits = model_->forward(to_device_.input(*batch));
      const at::Tensor target = to_device_.target(*batch);
      sums.loss += at::cross_entropy_loss(logits, target, {}, at::Reduction::Sum).item<double>();
      sums.correct += logits.argmax(1).eq(target).sum().item<double>();
      sums.samples += static_cast<double>(batch->size());
    }
    const SampleSums all = sums.over_all_ranks();
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
    position_.epoch_line = RunFolder::line_of(record);
    epoch_sums_ = {};
    data::SamplerState next = loader_.state();
    next.epoch = position_.sampler.epoch + 1;
    next.consumed = 0;
    save(next, best);
    do_on_rank_0([&] { folder_->append(position_.epoch_line); });
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

  /// Every rank calls it and contributes the state of its random number generator.
  void save(const data::SamplerState& sampler, bool best) {
    const at::Tensor own = at::globalContext().defaultGenerator(device_).get_state();
    const auto rng_states = dist::all_gather(own.to(device_));
    do_on_rank_0([&] {
      Checkpoint checkpoint = position_;
      checkpoint.model = state_of(*model_);
      checkpoint.optimizer = optimizer_->state();
      checkpoint.sampler = sampler;
      checkpoint.epoch_loss = epoch_sums_.loss;
      checkpoint.epoch_samples = static_cast<int64_t>(epoch_sums_.samples);
      checkpoint.world_size = dist::world_size();
      checkpoint.rng_states = rng_states;
      checkpoint.seconds = seconds();
      checkpoint.config = config_text_;
      const std::string bytes = serialize(checkpoint);
      // In this order: a run that crashes in between repeats the epoch, and writes best.pt again.
      if (best) base::write_file_atomically(folder_->best(), bytes);
      base::write_file_atomically(folder_->last(), bytes);
      saved_step_ = position_.step;
    });
  }

  int stop(int signal) {
    save(loader_.state(), /*best=*/false);
    do_on_rank_0([&] { folder_->log_end(fmt::format("signal {}", signal), position_.step); });
    if (is_rank_0()) {
      progress_.clear();
      spdlog::warn("stopped by signal {} after step {}; resume with --run_dir {} --resume auto",
                   signal, position_.step, folder_->path().string());
    }
    return base::kExitSignalBase + signal;
  }

  void finish(EpochRecord& record) {
    record.seconds = seconds();
    if (record.epoch == 0) record.epoch = position_.sampler.epoch, record.step = position_.step;
    do_on_rank_0([&] {
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
  data::Loader loader_;
  ResumeState resume_;
  const std::shared_ptr<models::Model> model_;
  const BatchToDevice to_device_;
  const std::unique_ptr<Optimizer> optimizer_;
  const std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<Ddp> ddp_;
  std::unique_ptr<RunFolder> folder_;  ///< on rank 0 only
  bool continues_epoch_ = false;
  bool is_first_step_ = true;
  DataWait data_wait_;
  /// How far the run is: a checkpoint without tensors, in the epoch `sampler.epoch`. epoch_loss and
  /// epoch_samples are of the part before the epoch was interrupted.
  Checkpoint position_;
  int64_t saved_step_ = 0;  ///< on rank 0: of the checkpoint in the folder
  SampleSums epoch_sums_;
};

}  // namespace

int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs) {
  auto trainer = explain_out_of_memory(MemoryUse::kSetup,
                                       [&] { return Trainer(config, config_text, name, inputs); });
  return explain_out_of_memory(MemoryUse::kLater, [&] { return trainer.run(); });
}

}  // namespace syncbn::train
