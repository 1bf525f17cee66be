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
#include <cmath>
#include <cstring>
#include <exception>
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
    is_finished_ = is_at_end() && !on_rank_0([&] { return finished_folder(); }).empty();
    // Last, since this removes the files of an earlier run.
    if (!is_finished_) do_on_rank_0([&] { start_folder(!resumed.empty()); });
  }

  int run() {
    if (is_finished_) return base::kExitOk;
    EpochRecord record;
    if (!position_.epoch_line.empty()) record = RunFolder::parse_line(position_.epoch_line);
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
    const config::Value former = config::parse_yaml(checkpoint.config, resume_.checkpoint_path);
    try {
      changed = changed_settings(former, config::parse_yaml(config_text_, name_));
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
    if (is_rank_0()) warn_of_another_rate(former);
  }

  /// More epochs stretch a cosine: the learning rate may rise again.
  void warn_of_another_rate(const config::Value& former) const {
    Config before;
    config::Faults faults;
    if (!config::Schema<Config>::get().read(former, before, "", faults)) return;
    const auto schedule = before.schedule.make(ScheduleArgs{
        optimizer_->base_lr(), before.epochs, std::max<int64_t>(loader_.num_batches(), 1)});
    const double was = schedule->lr(batches_done());
    const double is = schedule_->lr(batches_done());
    if (std::abs(was - is) <= 1e-3 * std::max(was, is)) return;
    spdlog::warn("the learning rate continues at {:.3g}, where {} and its {} epochs lead to {:.3g}",
                 is, resume_.checkpoint_path, before.epochs, was);
  }

  bool is_at_end() const { return position_.sampler.epoch >= config_.epochs; }

  /// The folder that holds the results of the run that is resumed, or "".
  std::string finished_folder() const {
    const std::string advice =
        fmt::format("{} is at the end of epoch {} of {}; to train on, raise epochs",
                    resume_.checkpoint_path, position_.sampler.epoch, config_.epochs);
    if (!resume_.continues_folder) throw base::UserError(advice);
    if (!RunFolder::has_result(resume_.folder)) return "";
    spdlog::info("{}, the run has finished: {}", name_, advice);
    return resume_.folder.string();
  }

  void start_folder(bool resumed) {
    const bool continues = resumed && resume_.continues_folder;
    config::Value config = config::parse_yaml(config_text_, name_);
    // A run from this file continues in this folder.
    config.set("run_dir", config::Value::of_scalar(resume_.folder.string(), /*quoted=*/true));
    folder_ = std::make_unique<RunFolder>(resume_.folder, config::to_yaml(config), continues);
    if (continues && !position_.epoch_line.empty()) folder_->complete_log(position_.epoch_line);
    folder_->log_start(dist::world_size(), position_.step, resumed);
    spdlog::info("{}: {} training and {}, {} x batch {}, {}, {}", name_, inputs_.train_set->size(),
                 base::counted(inputs_.test_set->size(), "test sample"),
                 base::counted(dist::world_size(), "rank"), inputs_.batch_size,
                 config_.sync_batchnorm ? "SyncBatchNorm" : "batch norm of each rank",
                 device_.is_cuda() ? "GPU" : "CPU");
    describe_data();
    if (config_.loader.pin_memory && !device_.is_cuda()) {
      spdlog::warn("loader.pin_memory changes nothing: this run has no GPU");
    }
    if (resumed) {
      spdlog::info("resumes from {} at epoch {}, step {}", resume_.checkpoint_path,
                   position_.sampler.epoch + 1, position_.step);
    }
    spdlog::info("writes to {}", folder_->path().string());
  }

  void describe_data() const {
    constexpr size_t kShown = 10;
    const data::Dataset& set = *inputs_.train_set;
    if (std::vector<std::string> names = set.class_names(); !names.empty()) {
      const std::string count =
          names.size() == 1 ? "1 class" : fmt::format("{} classes", names.size());
      if (names.size() > kShown) names.erase(names.begin() + kShown, names.end() - 1);
      spdlog::info("{}: {}", count, base::join(names, ", "));
    }
    if (set.num_classes() == 1) {
      spdlog::warn("the data has one class only: every network is right without training");
    }
    const int64_t samples = inputs_.sampler->size();
    if (inputs_.batch_size > samples) {
      spdlog::warn("a batch of {} is more than the {} of a rank: an epoch is one step",
                   inputs_.batch_size, base::counted(samples, "sample"));
    }
  }

  /// Trains the rest of an epoch. Returns the signal that stops the run, or 0.
  int train_epoch(EpochRecord& record) {
    ddp_->train();
    epoch_sums_ = {};
    data_wait_.start_epoch();
    // A run that resumes after the epoch's last step has no step left to set it.
    record.lr = scheduled_lr();
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
    record.images_per_second = trained > 0 ? epoch_sums_.samples / trained : 0;
    epoch_sums_.loss += position_.epoch_loss;
    epoch_sums_.samples += static_cast<double>(position_.epoch_samples);
    position_.epoch_loss = 0;
    position_.epoch_samples = 0;
    record.epoch = position_.sampler.epoch + 1;
    record.step = position_.step;
    record.train_loss = epoch_sums_.samples > 0 ? epoch_sums_.loss / epoch_sums_.samples : 0;
    const DataWait::Means wait = longest(data_wait_.of_epoch(trained));
    record.data_wait_seconds = wait.seconds;
    record.data_wait_share = wait.share;
    record.test_loss.reset();
    record.test_accuracy.reset();
    return signal;
  }

  /// Batches of the run up to the last that the loader returned, in this run's batch size. A run
  /// that resumes with another batch size has taken fewer or more steps (position_.step).
  int64_t batches_done() const {
    return position_.sampler.epoch * loader_.num_batches() + loader_.num_batches() -
           loader_.batches_left();
  }

  /// The learning rate of the step on the last batch.
  double scheduled_lr() const { return schedule_->lr(std::max<int64_t>(batches_done() - 1, 0)); }

  int train_step(const data::Batch& batch, EpochRecord& record) {
    record.lr = scheduled_lr();
    ddp_->zero_grad();
    const at::Tensor logits = ddp_->forward(to_device_.input(batch));
    const at::Tensor loss = at::cross_entropy_loss(logits, to_device_.target(batch));
    // Ahead of the update, so that a loss that is not finite never reaches the parameters.
    const StepVote::Result vote = vote_.cast(StopSignals::received(), loss, batch.size());
    if (!vote.is_finite()) give_up(vote.worst_rank, record.lr);
    loss.backward();
    optimizer_->step(record.lr);
    ++position_.step;
    epoch_sums_.loss += vote.loss_sum;
    epoch_sums_.samples += static_cast<double>(vote.samples);
    show_progress(vote.loss());
    return vote.stop_signal;
  }

  [[noreturn]] void give_up(int64_t rank, double lr) {
    if (!is_rank_0()) throw QuietExit{base::kExitUsage};
    progress_.clear();
    folder_->log_end("loss is not finite", position_.step);
    std::error_code ignored;
    const std::string last = folder_->last().string();
    throw base::UserError(fmt::format(
        "the loss of rank {} is not finite in step {} (epoch {}, learning rate {:.3g}); try a "
        "lower learning rate or a warm-up, or look at the data; {}",
        rank, position_.step + 1, position_.sampler.epoch + 1, lr,
        fs::exists(last, ignored) ? fmt::format("{} holds the run after step {}", last, saved_step_)
                                  : "nothing was saved yet"));
  }

  void show_progress(double loss) {
    channel_.heartbeat(static_cast<uint64_t>(position_.step));
    if (!is_rank_0()) return;
    const int64_t total = position_.step + config_.epochs * loader_.num_batches() - batches_done();
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
    data::Loader loader(inputs_.test_set,
                        std::make_shared<data::SequentialShardSampler>(
                            inputs_.test_set->size(), dist::world_size(), dist::rank()),
                        options);
    loader.start_epoch(0);
    SampleSums sums;
    std::exception_ptr damaged;
    try {
      while (const auto batch = loader.next()) {
        const at::Tensor logits = model_->forward(to_device_.input(*batch));
        const at::Tensor target = to_device_.target(*batch);
        sums.loss += at::cross_entropy_loss(logits, target, {}, at::Reduction::Sum).item<double>();
        sums.correct += logits.argmax(1).eq(target).sum().item<double>();
        sums.samples += static_cast<double>(batch->size());
      }
    } catch (const base::UserError&) {
      damaged = std::current_exception();
      sums.failed_ranks = 1;
    }
    const SampleSums all = sums.over_all_ranks();
    if (all.failed_ranks > 0) {
      // The epoch's training is not lost.
      save(end_of_epoch(), /*best=*/false);
      if (damaged) std::rethrow_exception(damaged);
      throw QuietExit{base::kExitUsage};
    }
    record.test_loss = all.loss / all.samples;
    record.test_accuracy = all.correct / all.samples;
  }

  data::SamplerState end_of_epoch() const {
    data::SamplerState next = loader_.state();
    next.epoch = std::min(position_.sampler.epoch + 1, config_.epochs);
    next.consumed = 0;
    return next;
  }

  void finish_epoch(EpochRecord& record, bool evaluates) {
    epoch_sums_ = {};
    position_.epoch_line = RunFolder::line_of(record);
    if (evaluates) evaluate(record);
    const bool best = evaluates && *record.test_accuracy > position_.best_accuracy;
    if (best) {
      position_.best_accuracy = *record.test_accuracy;
      position_.best_epoch = record.epoch;
    }
    record.seconds = seconds();
    position_.epoch_line = RunFolder::line_of(record);
    save(end_of_epoch(), best);
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
    const std::string name = fmt::format("SIG{}", ::sigabbrev_np(signal));
    do_on_rank_0([&] { folder_->log_end(name, position_.step); });
    if (is_rank_0()) {
      progress_.clear();
      spdlog::warn("stopped by {} after step {}; resume with --run_dir {} --resume auto", name,
                   position_.step, folder_->path().string());
    }
    return signal == SIGINT ? base::kExitSignalBase + signal : base::kExitPreempted;
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
  bool is_finished_ = false;
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
