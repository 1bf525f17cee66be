#include <syncbn/train/trainer.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sampler.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <utility>

#include "best_results.h"
#include "checkpoint_writer.h"
#include "data_wait.h"
#include "evaluation.h"
#include "model.h"
#include "out_of_memory.h"
#include "progress.h"
#include "rank_0.h"
#include "resume.h"
#include "run_folder.h"
#include "stopping.h"
#include "training_step.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using config::Duration;

constexpr int64_t kMaxRestores = 3;
constexpr const char* kAverage = "ema_";  // results of the moving average

std::string with_seed(const std::string& config_text, int64_t seed) {
  config::Value config = config::parse_yaml(config_text, "config");
  config.set("seed", config::Value::of_scalar(std::to_string(seed)));
  return config::to_yaml(config);
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Trainer {
 public:
  Trainer(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs)
      : config_(config),
        name_(name),
        inputs_(inputs),
        device_(dist::device()),
        channel_(dist::rank()),
        progress_(channel_),
        resume_(find_resume_state(config, name)),
        config_text_(with_seed(config_text, resume_.seed)),
        loader_(inputs.train_set, inputs.make_sampler(resume_.seed), loader_options()),
        task_(config.task.make(*inputs.train_set)),
        model_(make_model(config, *inputs.train_set, resume_.seed)),
        to_device_({.device = device_,
                    .pinned = loader_options().pin_memory,
                    .memory_format = memory_format(config, *model_),
                    .normalization = inputs.train_set->normalization()}),
        step_(config, *task_, to_device_, model_),
        evaluator_(config, inputs, *task_, to_device_, loader_options()),
        schedule_(make_schedule(config)) {
    report_on_rank_0([&] { check_metric(); });
    // The checkpoint is as large as the model: this releases it after the constructor.
    const std::string resumed = std::exchange(resume_.checkpoint, {});
    if (!resumed.empty()) {
      report_on_rank_0([&] { resume_from(parse_checkpoint(resumed, resume_.checkpoint_path)); });
    }
    is_finished_ = is_over() && !on_rank_0([&] { return finished_folder(); }).empty();
    // Last, since this removes the files of an earlier run.
    if (!is_finished_) do_on_rank_0([&] { start_folder(!resumed.empty()); });
  }

  int run() {
    if (is_finished_) return base::kExitOk;
    EpochRecord record = last_epoch();
    next_ = position_.sampler;
    if (owes_evaluation()) judge_epoch(record);
    int64_t& epoch = position_.sampler.epoch;
    while (!is_over()) {
      if (!continues_epoch_) loader_.start_epoch(epoch);
      continues_epoch_ = false;
      const Outcome outcome = train_epoch(record);
      if (outcome == Outcome::kStop) return stop();
      if (outcome == Outcome::kRestored) continue;
      finish_epoch(record);
    }
    if (record.eval.empty()) evaluate(record);
    finish(record);
    return base::kExitOk;
  }

 private:
  /// Why train_epoch() returns.
  enum class Outcome { kEndOfEpoch, kStop, kRestored };

  double seconds() const { return position_.seconds + seconds_since(begin_); }

  data::LoaderOptions loader_options() const {
    data::LoaderOptions options = config_.loader.options(inputs_.batch_size);
    // Without a GPU the loader of every rank would warn. start_folder() warns once.
    options.pin_memory = options.pin_memory && device_.is_cuda();
    return options;
  }

  std::unique_ptr<Schedule> make_schedule(const Config& config) const {
    const int64_t global_batch = inputs_.batch_size * dist::world_size();
    return config.schedule.make(ScheduleArgs{scaled_lr(step_.optimizer(), global_batch),
                                             config.epochs,
                                             std::max<int64_t>(loader_.num_batches(), 1)});
  }

  /// The names of an evaluation's results, with their direction.
  std::vector<Metric> measures() const {
    const std::vector<int64_t> none(static_cast<size_t>(task_->num_counts()));
    std::vector<Metric> all = task_->metrics(none);
    all.push_back({.name = "loss", .higher_is_better = false});
    if (config_.ema.decay == 0) return all;
    for (size_t i = 0, count = all.size(); i < count; ++i) {
      Metric average = all[i];
      average.name = kAverage + average.name;
      all.push_back(std::move(average));
    }
    return all;
  }

  /// The measure by which the best checkpoint is chosen.
  Metric chosen_metric() const {
    const std::vector<Metric> all = measures();
    const std::string& wanted = config_.checkpoint.keep_best.metric;
    const auto found = wanted.empty() ? all.begin() : std::ranges::find(all, wanted, &Metric::name);
    if (found != all.end()) return *found;
    std::vector<std::string> names;
    for (const Metric& metric : all) names.push_back(metric.name);
    throw base::UserError(
        fmt::format("checkpoint.keep_best.metric: there is no '{}'; choose from {}", wanted,
                    base::join(names, ", ")));
  }
  void check_metric() const { chosen_metric(); }

  // ---- resuming --------------------------------------------------------------------------------

  void resume_from(Checkpoint checkpoint) {
    std::vector<std::string> changed;
    const config::Value former = config::parse_yaml(checkpoint.config, resume_.checkpoint_path);
    const int64_t ranks = checkpoint.world_size;
    try {
      changed = changed_settings(former, config::parse_yaml(config_text_, name_));
      restore(std::move(checkpoint));
    } catch (const base::UserError& error) {
      throw base::UserError(
          fmt::format("cannot resume from {}: {}", resume_.checkpoint_path, error.what()));
    }
    if (!is_rank_0()) return;
    if (!changed.empty()) {
      spdlog::warn("{} was made with another configuration; the run continues with {}",
                   resume_.checkpoint_path, base::join(changed, ", "));
    }
    if (ranks != dist::world_size() && !is_over()) {
      spdlog::warn("{} is of {} and this run has {}: it continues, but not bit for bit",
                   resume_.checkpoint_path, base::counted(ranks, "rank"), dist::world_size());
    }
    warn_of_another_rate(former);
  }

  /// Puts everything where it was when the checkpoint was saved.
  /// @throws base::UserError when it does not fit; its message calls the checkpoint "it".
  void restore(Checkpoint checkpoint) {
    if (!checkpoint.has_optimizer) {
      throw base::UserError("it holds a network without the state of the run; resume from last.pt");
    }
    load_model(checkpoint.model, *model_);
    step_.optimizer().load(checkpoint.optimizer);
    loader_.resume(checkpoint.sampler);
    schedule_->load(checkpoint.schedule);
    if (step_.scaler() != nullptr && !checkpoint.scaler.empty()) {
      step_.scaler()->load(checkpoint.scaler);
    }
    // A checkpoint without averages starts them with its parameters.
    if (step_.ema() != nullptr) {
      step_.ema()->load(checkpoint.ema.empty() ? checkpoint.model : checkpoint.ema);
    }
    const auto rank = static_cast<size_t>(dist::rank());
    if (checkpoint.world_size == dist::world_size() && rank < checkpoint.rng_states.size()) {
      at::Generator generator = at::globalContext().defaultGenerator(device_);
      generator.set_state(checkpoint.rng_states[rank]);
    }
    for (auto* tensors : {&checkpoint.model, &checkpoint.ema, &checkpoint.scaler}) tensors->clear();
    checkpoint.optimizer.clear();
    checkpoint.rng_states.clear();
    position_ = std::move(checkpoint);
    saved_step_ = position_.step;
    continues_epoch_ = true;
  }

  /// More epochs stretch a cosine: the learning rate may rise again.
  void warn_of_another_rate(const config::Value& former) const {
    Config before;
    config::Faults faults;
    if (!config::Schema<Config>::get().read(former, before, "", faults)) return;
    const auto schedule = make_schedule(before);
    schedule->load(schedule_->state());
    const double was = schedule->lr(batches_done());
    const double is = schedule_->lr(batches_done());
    if (std::abs(was - is) <= 1e-3 * std::max(was, is)) return;
    spdlog::warn(
        "the learning rate continues at {:.3g}, where the schedule of {} and its {} leads "
        "to {:.3g}",
        is, resume_.checkpoint_path, base::counted(before.epochs, "epoch"), was);
  }

  /// The folder that holds the results of the run that is resumed, or "".
  std::string finished_folder() const {
    const char* const limit = stopped_early()                            ? "early_stop.patience"
                              : position_.sampler.epoch < config_.epochs ? "max_steps"
                                                                         : "epochs";
    const std::string advice =
        fmt::format("{} is at the end of epoch {} of {}; to train on, raise {}",
                    resume_.checkpoint_path, position_.sampler.epoch, config_.epochs, limit);
    if (!resume_.continues_folder) throw base::UserError(advice);
    if (!RunFolder::has_result(resume_.folder)) return "";
    spdlog::info("{}, the run has finished: {}", name_, advice);
    return resume_.folder.string();
  }

  // ---- the start -------------------------------------------------------------------------------

  void start_folder(bool resumed) {
    const bool continues = resumed && resume_.continues_folder;
    config::Value config = config::parse_yaml(config_text_, name_);
    // A run from this file continues in this folder.
    config.set("run_dir", config::Value::of_scalar(resume_.folder.string(), /*quoted=*/true));
    config.set("resume", config::Value::of_scalar("auto", /*quoted=*/true));
    config.set("overwrite", config::Value::of_scalar("false"));
    folder_ = std::make_unique<RunFolder>(resume_.folder, config::to_yaml(config), continues);
    if (continues) {
      folder_->rewind_log(position_.step, owes_evaluation() ? "" : position_.epoch_line);
    }
    folder_->log_start(dist::world_size(), position_.step, resumed);
    spdlog::info("{}: {} training and {} samples, {} x batch {}, {}, {}{}", name_,
                 inputs_.train_set->size(),
                 fmt::format("{} {}", inputs_.eval_set->size(), eval_split()),
                 base::counted(dist::world_size(), "rank"), inputs_.batch_size,
                 config_.sync_batchnorm ? "SyncBatchNorm" : "batch norm of each rank",
                 device_.is_cuda() ? "GPU" : "CPU",
                 config_.amp == "none" ? "" : fmt::format(", {}", config_.amp));
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
      const bool is_long = names.size() > kShown;
      names.resize(std::min(names.size(), kShown));
      spdlog::info("{}: {}{}", count, base::join(names, ", "), is_long ? ", …" : "");
    }
    if (inputs_.eval_split == data::Split::kTest) {
      spdlog::info("no validation data: best.pt is chosen on the test split (see val_fraction)");
    }
    if (set.num_classes() == 1) {
      spdlog::warn("the data has one class only: every network is right without training");
    }
    const int64_t samples = inputs_.make_sampler(resume_.seed)->size();
    if (inputs_.batch_size > samples) {
      spdlog::warn("a batch of {} is more than the {} of a rank: an epoch is one step",
                   inputs_.batch_size, base::counted(samples, "sample"));
    }
  }

  std::string eval_split() const { return to_string(inputs_.eval_split); }

  // ---- an epoch --------------------------------------------------------------------------------

  bool reached_max_steps() const {
    return config_.max_steps && position_.step >= *config_.max_steps;
  }
  bool stopped_early() const {
    const int64_t patience = config_.early_stop.patience;
    return patience > 0 && position_.stale_evaluations >= patience;
  }
  bool is_over() const {
    return position_.sampler.epoch >= config_.epochs || reached_max_steps() || stopped_early();
  }
  EpochRecord last_epoch() const {
    return position_.epoch_line.empty() ? EpochRecord{}
                                        : RunFolder::parse_line(position_.epoch_line);
  }
  /// Whether the run that is resumed ended in the evaluation of its last epoch.
  bool owes_evaluation() const {
    const EpochRecord last = last_epoch();
    return last.epoch > 0 && last.eval.empty() && evaluates(last.epoch);
  }
  bool evaluates(int64_t epoch) const {
    return epoch == config_.epochs || epoch % config_.eval_interval == 0 || reached_max_steps();
  }

  /// Trains the rest of an epoch.
  Outcome train_epoch(EpochRecord& record) {
    step_.train();
    data_wait_.start_epoch();
    epoch_samples_ = 0;
    // A run that resumes after the epoch's last step has no step left to set it.
    record.lr = scheduled_lr();
    const auto begin = Clock::now();
    auto outcome = Outcome::kEndOfEpoch;
    const auto next_step = [&] {
      const auto batch = loader_.next();
      if (!batch) return false;
      data_wait_.add(loader_.wait_seconds());
      const auto left = train_step(*batch, record);
      if (left) outcome = *left;
      return !left;
    };
    bool continues =
        is_first_step_ ? explain_out_of_memory(MemoryUse::kFirstStep, next_step) : next_step();
    is_first_step_ = false;
    while (continues) continues = next_step();
    if (outcome == Outcome::kRestored || !take_last_vote()) return Outcome::kRestored;
    const double trained = seconds_since(begin);
    record.images_per_second = trained > 0 ? static_cast<double>(epoch_samples_) / trained : 0;
    record.epoch = position_.sampler.epoch + 1;
    record.step = position_.step;
    const DataWait::Means wait = longest(data_wait_.of_epoch(trained));
    record.data_wait_seconds = wait.seconds;
    record.data_wait_share = wait.share;
    record.eval.clear();
    record.eval_split = eval_split();
    return outcome;
  }

  /// Batches of the run up to the last that the loader returned, in this run's batch size. A run
  /// that resumes with another batch size has taken fewer or more steps (position_.step).
  int64_t batches_done() const {
    return position_.sampler.epoch * loader_.num_batches() + loader_.num_batches() -
           loader_.batches_left();
  }

  /// The learning rate of the step on the last batch.
  double scheduled_lr() const {
    return schedule_->lr(std::max<int64_t>(batches_done() - 1, 0)) * position_.lr_scale;
  }

  /// Random numbers of a rank's batch, whatever happened before it.
  data::SampleRandom random_of_batch() const {
    constexpr int64_t kOtherThanSamples = 0x6d6978;  // those of the loader have the run's seed
    const int64_t batch = loader_.num_batches() - loader_.batches_left();
    return {resume_.seed ^ kOtherThanSamples, position_.sampler.epoch,
            batch * dist::world_size() + dist::rank()};
  }

  Wishes wishes() const {
    Wishes own{.stop_signal = StopSignals::received()};
    if (!is_rank_0()) return own;
    const Duration& every = config_.checkpoint.every;
    own.wants_save = every.unit == Duration::Unit::kSeconds && seconds_since(saved_) >= every.count;
    own.wants_stop = config_.max_time && seconds_since(begin_) >= config_.max_time->count;
    return own;
  }

  /// Why the epoch ends here, or nothing.
  std::optional<Outcome> train_step(const data::Batch& batch, EpochRecord& record) {
    const double former_lr = std::exchange(record.lr, scheduled_lr());
    data::SampleRandom random = random_of_batch();
    const auto former = step_.run(batch, record.lr, random, wishes());
    if (former && !step_.accepts(*former)) {
      recover(*former);
      return Outcome::kRestored;
    }
    ++position_.step;
    step_.update_average(position_.step, epochs_done() < config_.ema.start);
    channel_.heartbeat(static_cast<uint64_t>(position_.step));
    if (former) account(*former, position_.step - 1, former_lr);
    if (reached_max_steps()) return Outcome::kEndOfEpoch;
    const bool stops = former && (former->wishes.stop_signal != 0 || former->wishes.wants_stop);
    if (stops) {
      stop_wishes_ = former->wishes;
      return Outcome::kStop;
    }
    const bool is_due = (former && former->wishes.wants_save) || is_due_by_steps();
    if (is_due && loader_.batches_left() > 0) {
      if (!take_last_vote()) return Outcome::kRestored;
      save(loader_.state());
    }
    return std::nullopt;
  }

  double epochs_done() const {
    return static_cast<double>(batches_done()) / static_cast<double>(loader_.num_batches());
  }

  bool is_due_by_steps() const {
    const Duration& every = config_.checkpoint.every;
    if (every.unit == Duration::Unit::kSteps) {
      return position_.step % static_cast<int64_t>(every.count) == 0;
    }
    if (every.unit != Duration::Unit::kEpochs) return false;
    const double before = epochs_done() - 1.0 / static_cast<double>(loader_.num_batches());
    return std::floor(epochs_done() / every.count) > std::floor(before / every.count);
  }

  /// Waits for the last step. False: it was not accepted, and the run continues elsewhere.
  bool take_last_vote() {
    const auto last = step_.finish();
    if (!last) return true;
    if (step_.accepts(*last)) {
      account(*last, position_.step, scheduled_lr());
      return true;
    }
    recover(*last);
    return false;
  }

  /// Adds a step's result to the epoch's.
  void account(const StepVote::Result& result, int64_t step, double lr) {
    epoch_samples_ += result.samples;
    if (result.is_finite()) {
      position_.epoch_loss += result.loss_sum;
      position_.epoch_samples += result.samples;
    } else if (is_rank_0()) {
      progress_.clear();
      spdlog::warn("the loss of rank {} is not finite in step {}: the step changed nothing",
                   result.first_bad_rank, step);
    }
    if (!is_rank_0()) return;
    const int64_t total = total_steps();
    progress_.show(step, total,
                   fmt::format("epoch {}/{}  loss {:.4f}", position_.sampler.epoch + 1,
                               config_.epochs, result.loss()));
    if (config_.log_interval == 0 || step % config_.log_interval != 0) return;
    progress_.clear();
    const double wait = data_wait_.mean_since_last();
    spdlog::info("step {}/{}  loss {:.4f}  data wait {}", step, total, result.loss(),
                 base::format_seconds(wait));
    folder_->log_step(step, position_.sampler.epoch + 1, result.loss(), lr, wait);
  }

  int64_t total_steps() const {
    const int64_t total = position_.step + config_.epochs * loader_.num_batches() - batches_done();
    return std::min(total, config_.max_steps.value_or(total));
  }

  /// After a step whose loss was not finite: ends the run, or restores the last checkpoint.
  void recover(const StepVote::Result& result) {
    const int64_t step = position_.step;
    const std::string what =
        fmt::format("the loss of rank {} is not finite in step {} (epoch {}, learning rate {:.3g})",
                    result.first_bad_rank, step, position_.sampler.epoch + 1, scheduled_lr());
    const int64_t restores = position_.restores + 1;
    const std::string bytes = on_rank_0([&]() -> std::string {
      progress_.clear();
      writer_.wait();
      std::error_code ignored;
      const bool has_last = fs::exists(folder_->last(), ignored);
      if (config_.on_nan == "restore" && has_last && restores <= kMaxRestores) {
        return base::read_file(folder_->last());
      }
      folder_->log_end("loss is not finite", step - 1);
      const std::string last = folder_->last().string();
      throw base::UnavailableError(
          fmt::format("{}; try a lower learning rate or a warm-up, or look at the data; {}", what,
                      has_last ? fmt::format("{} holds the run after step {}", last, saved_step_)
                               : "nothing was saved yet"));
    });
    const double lr_scale = position_.lr_scale * config_.restore_lr;
    restore(parse_checkpoint(bytes, RunFolder::kLast));
    step_.take_counts();
    position_.restores = restores;
    position_.lr_scale = lr_scale;
    if (!is_rank_0()) return;
    folder_->rewind_log(position_.step, position_.epoch_line);
    spdlog::warn("{}; the run continues from step {} with {:.3g} of the learning rate", what,
                 position_.step, lr_scale);
  }

  // ---- the end of an epoch ---------------------------------------------------------------------

  void finish_epoch(EpochRecord& record) {
    collect_counts();
    const auto samples = static_cast<double>(std::max<int64_t>(position_.epoch_samples, 1));
    record.train = {{"loss", position_.epoch_loss / samples}};
    for (const Metric& metric : task_->metrics(position_.epoch_counts)) {
      record.train.emplace_back(metric.name, metric.value);
    }
    const bool is_whole = loader_.batches_left() == 0;
    if (is_whole) {
      position_.epoch_loss = 0;
      position_.epoch_samples = 0;
      position_.epoch_counts.clear();
    }
    next_ = is_whole ? end_of_epoch() : loader_.state();
    if (evaluates(record.epoch)) {
      judge_epoch(record);
    } else {
      record.seconds = seconds();
      position_.epoch_line = RunFolder::line_of(record);
      if (is_due_by_steps() || next_.epoch >= config_.epochs) save(next_);
      do_on_rank_0([&] { folder_->append(position_.epoch_line); });
      show(record);
    }
    position_.sampler = next_;
  }

  data::SamplerState end_of_epoch() const {
    data::SamplerState next = loader_.state();
    next.epoch = std::min(position_.sampler.epoch + 1, config_.epochs);
    next.consumed = 0;
    return next;
  }

  /// Evaluates after an epoch, keeps the checkpoint if it is one of the best, and logs the epoch.
  void judge_epoch(EpochRecord& record) {
    position_.epoch_line = RunFolder::line_of(record);
    evaluate(record);
    const Metric metric = chosen_metric();
    const double value = find(record.eval, metric.name).value_or(0);
    const BestChange change =
        add_result(position_.best, value, record.epoch, config_.checkpoint.keep_best.count,
                   metric.higher_is_better, config_.early_stop.min_delta);
    position_.stale_evaluations = change.improves ? 0 : position_.stale_evaluations + 1;
    schedule_->observe(*find(record.eval, "loss"));
    record.seconds = seconds();
    position_.epoch_line = RunFolder::line_of(record);
    const bool ends = next_.epoch >= config_.epochs || reached_max_steps() || stopped_early();
    save(next_, change, /*last=*/ends || is_due_by_steps());
    do_on_rank_0([&] { folder_->append(position_.epoch_line); });
    show(record);
    if (stopped_early() && is_rank_0()) {
      spdlog::info("ends early: {} evaluations without a better {}", position_.stale_evaluations,
                   metric.name);
    }
  }

  /// Fills in the record's results. If a sample is damaged, the epoch's training is saved first.
  void evaluate(EpochRecord& record) {
    record.eval.clear();
    record.eval_split = eval_split();
    try {
      prepare_statistics(config_, inputs_, *model_, to_device_, loader_options());
      add_results(record, "");
      if (Ema* const ema = step_.ema()) {
        const Ema::InPlace averages(*ema);
        prepare_statistics(config_, inputs_, *model_, to_device_, loader_options());
        add_results(record, kAverage);
      }
    } catch (const base::UserError&) {
      save_unevaluated();
      throw;
    } catch (const QuietExit&) {
      save_unevaluated();
      throw;
    }
  }

  void save_unevaluated() {
    save(next_);
    do_on_rank_0([&] { writer_.wait(); });
  }

  void add_results(EpochRecord& record, const std::string& prefix) {
    const Evaluation result = evaluator_.evaluate(*model_);
    record.eval.emplace_back(prefix + "loss", result.loss);
    for (const Metric& metric : result.metrics) {
      record.eval.emplace_back(prefix + metric.name, metric.value);
    }
    if (result.skipped > 0 && is_rank_0() && prefix.empty()) {
      progress_.clear();
      spdlog::warn("evaluation left out {}", base::counted(result.skipped, "damaged sample"));
    }
  }

  static std::string shown(const Metric& metric, double value) {
    return metric.is_share ? fmt::format("{:.2f} %", 100 * value) : fmt::format("{:.4f}", value);
  }

  /// "test loss 0.0429 accuracy 98.31 %": the loss and the first metric, also of the averages.
  std::string shown(const std::string& split, const Results& results) const {
    if (results.empty()) return "";
    std::string text = fmt::format("{} loss {:.4f}", split, find(results, "loss").value_or(0));
    const Metric first = measures().front();
    for (const std::string& prefix : {std::string(), std::string(kAverage)}) {
      const auto value = find(results, prefix + first.name);
      if (value) text += fmt::format(" {}{} {}", prefix, first.name, shown(first, *value));
    }
    return text + "  ";
  }

  void show(const EpochRecord& record) {
    if (!is_rank_0()) return;
    progress_.clear();
    spdlog::info("epoch {:{}d}/{}  {}{}lr {:.3g}  {:.0f} images/s  data wait {:.1f} %  {}",
                 record.epoch, std::to_string(config_.epochs).size(), config_.epochs,
                 shown("train", record.train), shown(record.eval_split, record.eval), record.lr,
                 record.images_per_second, 100 * record.data_wait_share,
                 base::format_seconds(record.seconds));
  }

  // ---- checkpoints -----------------------------------------------------------------------------

  /// Adds this epoch's counts since the last call, over all ranks, to the position.
  void collect_counts() {
    at::Tensor counts = step_.take_counts();
    dist::all_reduce(counts);
    counts = counts.cpu();
    position_.epoch_counts.resize(static_cast<size_t>(task_->num_counts()));
    for (size_t i = 0; i < position_.epoch_counts.size(); ++i) {
      position_.epoch_counts[i] += counts.const_data_ptr<int64_t>()[i];
    }
  }

  /// Saves the run in the background. Every rank calls it, and contributes the state of its random
  /// number generator.
  /// @param last write last.pt, besides what `change` asks for
  void save(const data::SamplerState& sampler, const BestChange& change = {}, bool last = true) {
    if (!last && !change.write) return;
    if (sampler.consumed > 0) collect_counts();
    const at::Tensor own = at::globalContext().defaultGenerator(device_).get_state();
    const auto rng_states = dist::all_gather(own.to(device_));
    do_on_rank_0([&] {
      Checkpoint checkpoint = position_;
      checkpoint.model = state_of(*model_);
      if (step_.ema() != nullptr) checkpoint.ema = step_.ema()->state();
      checkpoint.optimizer = step_.optimizer().state();
      if (step_.scaler() != nullptr) checkpoint.scaler = step_.scaler()->state();
      checkpoint.schedule = schedule_->state();
      checkpoint.sampler = sampler;
      checkpoint.world_size = dist::world_size();
      checkpoint.rng_states = rng_states;
      checkpoint.seconds = seconds();
      checkpoint.config = config_text_;
      writer_.wait();
      writer_.start([this, change, last, former_step = saved_step_,
                     host = copy_to_host(checkpoint)]() mutable {
        write(std::move(host), change, last, former_step);
      });
      if (last) saved_step_ = position_.step;
      saved_ = Clock::now();
    });
  }

  /// On the writer's thread. In this order: a run that crashes in between repeats the epoch, and
  /// writes the best checkpoint again.
  void write(Checkpoint checkpoint, const BestChange& change, bool last,
             int64_t former_step) const {
    const fs::path& folder = folder_->path();
    if (change.write) {
      std::error_code ignored;
      if (change.aside && !fs::exists(folder / *change.aside, ignored)) {
        fs::rename(folder / RunFolder::kBest, folder / *change.aside, ignored);
      }
      checkpoint.has_optimizer = false;
      write_checkpoint(checkpoint, folder / *change.write);
      if (change.remove) fs::remove(folder / *change.remove, ignored);
      checkpoint.has_optimizer = true;
    }
    if (!last) return;
    folder_->rotate(former_step, config_.checkpoint.keep_last);
    write_checkpoint(checkpoint, folder_->last());
  }

  // ---- the end ---------------------------------------------------------------------------------

  int stop() {
    save(loader_.state());
    const int signal = stop_wishes_.stop_signal;
    const std::string name =
        signal != 0 ? fmt::format("SIG{}", ::sigabbrev_np(signal)) : "max_time";
    do_on_rank_0([&] {
      writer_.wait();
      folder_->log_end(name, position_.step);
    });
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
    const Metric metric = chosen_metric();
    const Checkpoint::Best best =
        position_.best.empty() ? Checkpoint::Best{} : position_.best.front();
    do_on_rank_0([&] {
      writer_.wait();
      folder_->log_end("finished", position_.step);
      folder_->write_result({.best_metric = metric.name,
                             .best_value = best.value,
                             .best_epoch = best.epoch,
                             .last = record,
                             .world_size = dist::world_size(),
                             .seed = resume_.seed,
                             .sync_batchnorm = config_.sync_batchnorm});
    });
    if (!is_rank_0()) return;
    progress_.clear();
    const double value = find(record.eval, metric.name).value_or(0);
    spdlog::info("{} {} {}, best {} (epoch {}), in {}", eval_split(), metric.name,
                 shown(metric, value), shown(metric, best.value), best.epoch,
                 base::format_seconds(record.seconds));
  }

  const Config& config_;
  const std::string name_;
  const Inputs& inputs_;
  const Clock::time_point begin_ = Clock::now();
  const StopSignals signals_;
  const at::Device device_;
  AgentChannel channel_;
  Progress progress_;
  ResumeState resume_;
  const std::string config_text_;  ///< with the seed that is used
  data::Loader loader_;
  const std::unique_ptr<Task> task_;
  const std::shared_ptr<models::Model> model_;
  const BatchToDevice to_device_;
  TrainingStep step_;
  const Evaluator evaluator_;
  const std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<RunFolder> folder_;  ///< on rank 0 only
  bool continues_epoch_ = false;
  bool is_finished_ = false;
  bool is_first_step_ = true;
  DataWait data_wait_;
  /// How far the run is: a checkpoint without tensors, in the epoch `sampler.epoch`.
  Checkpoint position_;
  data::SamplerState next_;    ///< where the run continues after the epoch
  Wishes stop_wishes_;         ///< why it stops
  int64_t epoch_samples_ = 0;  ///< of all ranks in this epoch, since the program started
  int64_t saved_step_ = 0;     ///< on rank 0: of the newest last.pt
  Clock::time_point saved_ = Clock::now();
  CheckpointWriter writer_;  ///< uses what is above
};

}  // namespace

int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(config.deterministic, /*warn_only=*/false);
  context.setDeterministicCuDNN(config.deterministic);
  context.setBenchmarkCuDNN(config.cudnn_benchmark);
  context.setAllowTF32CuBLAS(config.tf32);
  context.setAllowTF32CuDNN(config.tf32);
  auto trainer = explain_out_of_memory(MemoryUse::kSetup,
                                       [&] { return Trainer(config, config_text, name, inputs); });
  return explain_out_of_memory(MemoryUse::kLater, [&] { return trainer.run(); });
}

}  // namespace syncbn::train
