#include <syncbn/train/trainer.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/data/boxes.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sampler.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/best_results.h"
#include "checkpoints/checkpoint_writer.h"
#include "checkpoints/keepers.h"
#include "checkpoints/python_run.h"
#include "checkpoints/resume.h"
#include "checkpoints/run_state.h"
#include "checkpoints/sealed_archive.h"
#include "common/component_error.h"
#include "common/naming.h"
#include "common/out_of_memory.h"
#include "common/rank_0.h"
#include "evaluation.h"
#include "measures.h"
#include "profile/phases.h"
#include "profile/profiler.h"
#include "records/contact_sheet.h"
#include "records/data_wait.h"
#include "records/environment.h"
#include "records/epoch_record.h"
#include "records/gpu_load.h"
#include "records/histograms.h"
#include "records/memory_gauge.h"
#include "records/progress.h"
#include "records/run_folder.h"
#include "records/step_time.h"
#include "report/report_writer.h"
#include "run_display.h"
#include "run_plan.h"
#include "start_report.h"
#include "step/compute_threads.h"
#include "step/model.h"
#include "step/stopping.h"
#include "step/training_step.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using config::Duration;

constexpr int64_t kLogInterval = 10;  // steps, with log_interval: auto
constexpr int64_t kMaxRestores = 3;
// Time that these phases may take beyond the launcher's --hang_timeout.
constexpr std::chrono::minutes kPhaseAllowance{10};
constexpr const char* kEvaluation = "evaluation";
constexpr int64_t kMaxBadInRow = 100;  // with on_nan: skip

std::string with_seed(const std::string& config_text, int64_t seed) {
  config::Value config = config::parse_yaml(config_text, "config");
  config.set("seed", config::Value::of_scalar(std::to_string(seed)));
  return config::to_yaml(config);
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
        keepers_(config.checkpoint.on == "node", run_files::wanted_path(config.run_dir, name)),
        resume_(find_resume_state(config, name, keepers_)),
        config_text_(with_seed(config_text, resume_.seed)),
        loader_(inputs.train_set, inputs.make_sampler(resume_.seed), loader_options()),
        model_(first_model()),
        task_(make_task(config, *inputs.train_set, *model_)),
        measures_(report_on_rank_0(
            [&] { return Measures(config, *task_, AddedMetrics(config, *inputs.train_set)); })),
        to_device_(batch_to_device(config, *model_, *inputs.train_set,
                                   /*pinned=*/loader_options().pin_memory)),
        step_(config, *task_, to_device_, model_, replicas()),
        evaluator_(config, inputs, *model_, to_device_, loader_options()),
        schedule_(make_schedule(config)),
        state_(config, *model_, step_, loader_, *schedule_),
        plan_(config, loader_, position_),
        display_(config, measures_, channel_, device_),
        profiler_(config.profile, *model_) {
    // The checkpoint is as large as the model: do not hold it after the constructor.
    std::string resumed = std::exchange(resume_.checkpoint, {});
    if (is_of_python(resumed)) resumed = on_rank_0([&] { return converted_python_run(); });
    position_.sampler.epoch = config.start_epoch;
    if (!resumed.empty()) {
      report_on_rank_0([&] { resume_from(parse_checkpoint(resumed, resume_.checkpoint_path)); });
    }
    is_finished_ = plan_.is_over() && !on_rank_0([&] { return finished_folder(); }).empty();
    if (is_finished_) return;
    report_on_rank_0([&] {
      const int64_t total = plan_.total_steps_after(batches_done());
      check_plan(config_, inputs_, loader_, dist::world_size(), *schedule_, total,
                 total - position_.step, *model_);
    });
    const std::string environment = describe_environment(inputs);
    // Last, because it removes the files of an earlier run.
    keepers_.each([&] { start_folder(!resumed.empty(), environment); });
  }

  int run() {
    try {
      return run_epochs();
    } catch (const std::exception& error) {
      note_failure(error);
      throw;
    }
  }

 private:
  /// Why train_epoch() returns.
  enum class Outcome { kEndOfEpoch, kStop, kRestored };

  int run_epochs() {
    if (is_finished_) return base::kExitOk;
    EpochRecord record = plan_.last_epoch();
    next_ = position_.sampler;
    if (plan_.owes_evaluation() && !judge_epoch(record)) return stop(next_);
    if (plan_.owes_last_evaluation()) {
      record = {.epoch = position_.sampler.epoch + 1, .step = position_.step, .lr = scheduled_lr()};
      if (!finish_epoch(record)) return stop(next_);
    }
    int64_t& epoch = position_.sampler.epoch;
    while (!plan_.is_over()) {
      if (!continues_epoch_) loader_.start_epoch(epoch);
      continues_epoch_ = false;
      const Outcome outcome = train_epoch(record);
      if (outcome == Outcome::kStop) return stop(loader_.state());
      if (outcome == Outcome::kRestored) continue;
      if (!finish_epoch(record)) return stop(next_);
    }
    if (record.eval.empty() && !evaluate(record)) return stop(position_.sampler);
    finish(record);
    return base::kExitOk;
  }

  /// Calls `work`, which uses the run's folder. Its path was right when the run began: the disk has
  /// failed, or the folder was removed.
  /// @throws base::UnavailableError in place of base::PathError
  static void on_folder(const std::function<void()>& work) {
    try {
      work();
    } catch (const base::PathError& error) {
      throw base::UnavailableError(error.reason() +
                                   "; the run's folder could be written when it began");
    }
  }

  /// Each keeper calls `work`, as on_folder() does. Every rank calls this.
  void write(const std::function<void()>& work) const {
    keepers_.each([&] { on_folder(work); });
  }

  /// Logs the error that ends the run. The other ranks may be gone.
  void note_failure(const std::exception& error) {
    if (!keepers_.is_one()) return;
    try {
      const std::string_view what = error.what();
      const bool is_peers = dynamic_cast<const dist::PeerError*>(&error) != nullptr;
      if (!is_peers || !folder_->has_end()) {
        folder_->log_end(fmt::format("an error: {}", what.substr(0, what.find('\n'))),
                         position_.step);
      }
    } catch (const std::exception&) {
      // Only the first error counts. If the disk is full, it is the same one.
    }
    try {
      renew_report();
      offer_resume();
      if (!base::env("TORCHELASTIC_RUN_ID") && base::exists(folder_->last())) {
        display_.warn("to resume from the last checkpoint: {}", resume_command(folder_->path()));
      }
    } catch (const std::exception&) {
      // Only the first error counts.
    }
  }

  /// Tells the launcher the command that continues the job if it fails, once there is a checkpoint.
  void offer_resume() {
    if (!has_saved_ || offers_resume_ || !is_rank_0() || !base::exists(folder_->last())) return;
    offers_resume_ = true;
    channel_.tell(SYNCBN_AGENT_RESUME, resume_command(folder_->path()));
  }

  double seconds() const { return position_.seconds + base::seconds_since(counted_from_); }

  data::LoaderOptions loader_options() const {
    data::LoaderOptions options = config_.loader.options(inputs_.batch_size, device_);
    options.sample_name = "training sample";
    return options;
  }

  std::shared_ptr<models::Model> first_model() const {
    auto model = make_model(config_, *inputs_.train_set, resume_.seed);
    if (resume_.checkpoint.empty()) init_model(config_, *model);
    return model;
  }

  /// Chooses the number of threads first: the replicas share them.
  std::shared_ptr<Replicas> replicas() const {
    choose_threads(config_, *model_, *inputs_.train_set, inputs_.batch_size);
    return make_replicas(config_, *inputs_.train_set, *task_, model_);
  }

  std::unique_ptr<Schedule> make_schedule(const Config& config) const {
    const int64_t global_batch = inputs_.batch_size * dist::world_size();
    const ScheduleArgs args{scaled_lr(step_.optimizer(), global_batch), config.epochs,
                            std::max<int64_t>(loader_.num_batches(), 1)};
    return refusing([&] { return component_name("schedule", config.schedule); },
                    [&] { return config.schedule.make(args); });
  }

  // ---- resuming --------------------------------------------------------------------------------

  /// Prefix of messages about the checkpoint.
  std::string resuming() const { return "cannot resume from " + resume_.checkpoint_path; }

  /// Converts a checkpoint of a Python script. Only rank 0 reads the file.
  std::string converted_python_run() const {
    return naming(resuming(), [&] {
      return serialize(
          read_python_run(resume_.checkpoint_path, {.model = *model_,
                                                    .optimizer = step_.optimizer(),
                                                    .config = config_text_,
                                                    .start = loader_.state(),
                                                    .steps_per_epoch = loader_.num_batches(),
                                                    .world_size = dist::world_size()}));
    });
  }

  void resume_from(Checkpoint checkpoint) {
    std::vector<std::string> changed;
    const config::Value former = config::parse_yaml(checkpoint.config, resume_.checkpoint_path);
    const int64_t ranks = checkpoint.world_size;
    naming(resuming(), [&] {
      changed = changed_settings(former, config::parse_yaml(config_text_, name_));
      restore(std::move(checkpoint), resume_.checkpoint_path);
    });
    // With a lower count than before, start_folder() removes the files of the others.
    const auto kept = static_cast<size_t>(std::max<int64_t>(config_.checkpoint.keep_best.count, 1));
    position_.best.resize(std::min(position_.best.size(), kept));
    if (!is_rank_0()) return;
    if (!changed.empty()) {
      spdlog::warn("{} was made with another configuration; the run continues with {}",
                   resume_.checkpoint_path, base::join(changed, ", "));
    }
    if (ranks != dist::world_size() && !plan_.is_over()) {
      // The number of ranks changes the samples of a step with batch_size, but not with
      // global_batch_size.
      const int64_t batch = config_.batch_size.value_or(0);
      const int64_t before = batch * ranks;
      const bool is_divisible = before % dist::world_size() == 0;
      spdlog::warn("{} is of {} and this run has {}: it continues, but not bit for bit{}{}",
                   resume_.checkpoint_path, base::counted(ranks, "rank"), dist::world_size(),
                   batch == 0 ? ""
                              : fmt::format(", and a step has {} samples in place of {}",
                                            batch * dist::world_size(), before),
                   batch == 0 || !is_divisible ? ""
                                               : fmt::format("; batch_size={} keeps their number",
                                                             before / dist::world_size()));
    }
    warn_of_another_rate(former);
  }

  void restore(Checkpoint checkpoint, const std::string& name) {
    position_ = state_.restore(std::move(checkpoint), name);
    counted_from_ = continues_epoch_ || folder_ ? Clock::now() : begin_;
    continues_epoch_ = true;
  }

  /// More epochs stretch a cosine: the learning rate may rise again.
  void warn_of_another_rate(const config::Value& former) const {
    Config before;
    config::Faults faults;
    if (!config::Schema<Config>::get().read(former, before, "", faults)) return;
    const auto schedule = make_schedule(before);
    schedule->load(schedule_->state());
    const double was = schedule->lr(plan_.batches_done());
    const double is = schedule_->lr(plan_.batches_done());
    if (std::abs(was - is) <= 1e-3 * std::max(was, is)) return;
    spdlog::warn(
        "the learning rate continues at {:.3g}, where the schedule of {} and its {} leads "
        "to {:.3g}",
        is, resume_.checkpoint_path, base::counted(before.epochs, "epoch"), was);
  }

  /// With fewer epochs or steps than it has begun, the run would end as if it had finished.
  void refuse_to_end_before(int64_t epochs) const {
    const auto refuse = [&](const char* key, int64_t limit) {
      throw base::UserError(
          fmt::format("{}: {} is less than the run has done: {} is at step {}, in epoch {}; give a "
                      "higher number, or start a new run",
                      key, limit, resume_.checkpoint_path, position_.step, epochs));
    };
    if (epochs > config_.epochs) refuse("epochs", config_.epochs);
    if (position_.step > config_.max_steps.value_or(position_.step)) {
      refuse("max_steps", *config_.max_steps);
    }
  }

  /// The folder with the results of the resumed run, or "".
  std::string finished_folder() const {
    const char* const limit = plan_.stopped_early()                      ? "early_stop.patience"
                              : position_.sampler.epoch < config_.epochs ? "max_steps"
                                                                         : "epochs";
    const int64_t epoch = position_.sampler.epoch;
    const std::string of_all = epoch <= config_.epochs ? fmt::format(" of {}", config_.epochs) : "";
    const std::string advice = fmt::format("{} is at the end of epoch {}{}; to train on, raise {}",
                                           resume_.checkpoint_path, epoch, of_all, limit);
    if (!resume_.continues_folder) throw base::UserError(advice);
    if (!run_files::has_result(resume_.folder)) {
      refuse_to_end_before(epoch + (position_.sampler.consumed > 0 ? 1 : 0));
      return "";
    }
    spdlog::info("{}, the run has finished: {}", name_, advice);
    return resume_.folder.string();
  }

  /// As RunPlan::batches_done(). The loader of a new run has not started its first epoch.
  int64_t batches_done() const {
    return continues_epoch_ ? plan_.batches_done()
                            : position_.sampler.epoch * loader_.num_batches();
  }

  // ---- the start -------------------------------------------------------------------------------

  void start_folder(bool resumed, const std::string& environment) {
    const bool continues = resumed && resume_.continues_folder;
    const fs::path former = run_files::newest(config_.run_dir, name_);
    const bool is_unfinished = former != resume_.folder && run_files::is_unfinished(former);
    config::Value config = config::parse_yaml(config_text_, name_);
    // A run started from this file continues in the file's folder.
    config.set("run_dir", config::Value::of_scalar("${here}", /*quoted=*/true));
    config.set("resume", config::Value::of_scalar("auto", /*quoted=*/true));
    config.set("overwrite", config::Value::of_scalar("false"));
    if (!resume_.lock) resume_.lock = lock_of_run(resume_.folder);
    if (!continues && !config_.overwrite) run_files::refuse_if_saved(resume_.folder);
    folder_ = std::make_unique<RunFolder>(resume_.folder, config::to_yaml(config), continues,
                                          std::move(resume_.lock));
    // Absolute: the launcher may have another working directory.
    channel_.tell(SYNCBN_AGENT_LOG, fs::absolute(folder_->path() / run_files::kLog).string());
    has_saved_ = continues;
    if (continues) {
      std::map<std::string, int64_t> best;
      for (const Checkpoint::Best& one : position_.best) best[one.file] = one.step;
      run_files::set_aside_after(folder_->path(), position_.step, resume_.checkpoint_path, best);
      folder_->rewind_log(position_.step, position_.sampler.epoch,
                          plan_.owes_evaluation() ? "" : position_.epoch_line);
    }
    folder_->replace_file(run_files::kEnvironment, environment);
    const int64_t total = plan_.total_steps_after(batches_done());
    folder_->log_start(dist::world_size(), position_.step, resumed, total);
    writer_ =
        std::make_unique<CheckpointWriter>(*folder_, config_.checkpoint.keep_last, position_.step);
    if (config_.report) report_ = std::make_unique<ReportWriter>(folder_->path());
    if (!is_rank_0()) return;
    report_start(config_, name_, inputs_, *model_, resume_.seed);
    if (resumed) {
      spdlog::info("resumes from {} at epoch {}, step {}", resume_.checkpoint_path,
                   std::min(position_.sampler.epoch + 1, config_.epochs), position_.step);
    }
    spdlog::info("writes to {}{}", folder_->path().string(),
                 keepers_.count() > 1 ? fmt::format(" on {} nodes", keepers_.count()) : "");
    if (is_unfinished) {
      spdlog::info("{} has a run that was not finished; to resume it: {}", former.string(),
                   resume_command(former));
    }
  }

  /// The mean over the epoch's samples so far; NaN without a good step.
  double epoch_loss() const {
    return position_.epoch_loss / static_cast<double>(position_.epoch_samples);
  }

  std::string eval_split() const { return to_string(inputs_.eval_split); }

  // ---- an epoch --------------------------------------------------------------------------------

  /// Trains the rest of an epoch.
  Outcome train_epoch(EpochRecord& record) {
    step_.train();
    data_wait_.start_epoch();
    gpu_meter_.start_epoch();
    epoch_samples_ = 0;
    first_step_ = position_.step;
    // A run that resumes after the epoch's last step has no step left to set this.
    record.lr = scheduled_lr();
    epoch_begin_ = step_end_ = Clock::now();
    own_timer_.start();
    auto outcome = Outcome::kEndOfEpoch;
    const auto next_step = [&] {
      profiler_.begin_step(position_.step + 1);
      const auto batch = next_batch();
      if (!batch) return false;
      data_wait_.add(loader_.wait_seconds());
      const auto left = train_step(*batch, record);
      if (left) outcome = *left;
      if (profiler_.end_step()) write_profile();
      return !left;
    };
    const auto named_step = [&] {
      return placing([this] { return fmt::format("step {}", position_.step + 1); }, next_step);
    };
    bool continues =
        is_first_step_ ? explain_out_of_memory(MemoryUse::kFirstStep, named_step) : named_step();
    is_first_step_ = false;
    while (continues) continues = named_step();
    profiler_.pause();
    if (outcome == Outcome::kRestored || !take_last_vote()) return Outcome::kRestored;
    display_.clear();
    check_left_out(outcome == Outcome::kEndOfEpoch);
    const double trained = base::seconds_since(epoch_begin_);
    const double own = own_timer_.seconds();
    record.images_per_second = trained > 0 ? static_cast<double>(epoch_samples_) / trained : 0;
    record.epoch = position_.sampler.epoch + 1;
    record.step = position_.step;
    const DataWait::Means wait = longest(data_wait_.of_epoch(trained));
    record.data_wait_seconds = wait.seconds;
    record.data_wait_share = wait.share;
    record.gpu = gpu_meter_.of_all_ranks();
    if (const int64_t steps = position_.step - first_step_; steps > 0) {
      StepTime time = step_.take_times(steps);
      time.whole = trained / static_cast<double>(steps);
      time.data = data_wait_.of_epoch(trained).seconds;
      time.own = own / static_cast<double>(steps);
      time.memory_bytes = peak_resident_bytes();
      const std::vector<StepTime> times = of_all_ranks(time);
      record.memory_bytes = std::ranges::max(times, {}, &StepTime::memory_bytes).memory_bytes;
      write([&] { folder_->log_step_time(record.epoch, record.step, times); });
    }
    record.eval.clear();
    record.eval_split = eval_split();
    return outcome;
  }

  /// Each loader has checked what its own rank left out; this checks the sum over the ranks, and
  /// at the end of an epoch, or of what max_steps left of it, that it had a sample.
  void check_left_out(bool is_end_of_epoch) const {
    if (config_.loader.on_error != "skip") return;
    at::Tensor all =
        at::tensor({loader_.skipped(), loader_.num_samples()}, at::kLong).to(dist::device());
    dist::all_reduce(all);
    all = all.cpu();
    dist::throw_if_aborted();  // the sums are undefined then
    const auto skipped = all[0].item<int64_t>();
    const int64_t used = epoch_samples_ + position_.epoch_samples;
    report_on_rank_0([&] {
      if (is_end_of_epoch && used == 0 && skipped > 0) {
        // A sampler may have repeated some, for as many on each rank.
        data::refuse_empty_epoch(loader_options(), std::min(skipped, inputs_.train_set->size()));
      }
      data::check_skipped(loader_options(), skipped, all[1].item<int64_t>());
    });
  }

  std::optional<data::Batch> next_batch() {
    RECORD_USER_SCOPE(kLoaderPhase);
    return blaming([this] { return component_name("data", config_.data); },
                   [this] { return loader_.next(); });
  }

  /// Writes the profile of the last steps. Every rank calls it.
  void write_profile() {
    channel_.phase("profile", kPhaseAllowance);
    const auto lines = profiler_.write(is_rank_0() ? folder_->path() : fs::path());
    for (const std::string& line : lines) display_.info("{}", line);
    if (is_rank_0()) renew_report();
  }

  /// Writes a profile that has begun, since it ends with the run.
  void end_profile() {
    if (profiler_.has_steps()) return write_profile();
    if (!profiler_.is_pending()) return;
    display_.warn("profile: the run ended before the first step to record; lower profile.skip");
  }

  /// The learning rate of the step on the batch that the loader returned last.
  double scheduled_lr() const {
    const int64_t batch = std::max<int64_t>(plan_.batches_done() - 1, 0);
    return position_.lr_scale *
           blaming([this] { return component_name("schedule", config_.schedule); },
                   [&] { return schedule_->lr(batch); });
  }

  /// Random numbers for a rank's batch, independent of what happened before it.
  data::SampleRandom random_of_batch() const {
    constexpr int64_t kOtherThanSamples = 0x6d6978;  // the loader's own use the run's seed
    const int64_t batch = loader_.num_batches() - loader_.batches_left();
    return {resume_.seed ^ kOtherThanSamples, position_.sampler.epoch,
            batch * dist::world_size() + dist::rank()};
  }

  Wishes wishes() {
    Wishes own{.stop_signal = StopSignals::received()};
    if (own.stop_signal != 0 && !std::exchange(has_told_of_signal_, true)) {
      display_.info("{}: saves and stops", base::signal_name(own.stop_signal));
    }
    own.wants_stop = config_.max_time && seconds_of_job() >= config_.max_time->count;
    const Duration& every = config_.checkpoint.every;
    own.wants_save = is_rank_0() && every.unit == Duration::Unit::kSeconds &&
                     base::seconds_since(saved_) >= every.count;
    if (is_rank_0()) own.profile_steps = profiler_.requested(folder_->path());
    return own;
  }

  /// Returns why the epoch ends here, or nothing.
  std::optional<Outcome> train_step(const data::Batch& batch, EpochRecord& record) {
    const double former_lr = std::exchange(record.lr, scheduled_lr());
    picture_first_batch(batch);
    data::SampleRandom random = random_of_batch();
    const auto former = step_.run(batch, record.lr, random, wishes());
    if (former && (!step_.accepts(*former) || bad_in_row_ >= kMaxBadInRow)) {
      recover(*former, former_lr);
      return Outcome::kRestored;
    }
    ++position_.step;
    step_.update_average(position_.step, plan_.is_before(config_.ema.start));
    channel_.heartbeat(static_cast<uint64_t>(position_.step));
    offer_resume();
    if (former) {
      account(*former, position_.step - 1, former_lr);
      profiler_.request(former->wishes.profile_steps);
    }
    batch_seconds_ = base::seconds_since(std::exchange(step_end_, Clock::now()));
    data_seconds_ = loader_.wait_seconds();
    if (has_line(position_.step) && task_->counts_training()) collect_counts();
    if (plan_.reached_max_steps()) return Outcome::kEndOfEpoch;
    if (former && former->wishes.ends_run()) {
      stop_wishes_ = former->wishes;
      return Outcome::kStop;
    }
    const bool is_due = (former && former->wishes.wants_save) || plan_.saves();
    if (is_due && loader_.batches_left() > 0) {
      if (!take_last_vote()) return Outcome::kRestored;
      save(loader_.state());
    }
    return std::nullopt;
  }

  /// Waits for the last step. False: it was not accepted, and recover() has restored a checkpoint.
  bool take_last_vote() {
    const auto last = step_.finish();
    if (!last) return true;
    if (step_.accepts(*last)) {
      account(*last, position_.step, scheduled_lr());
      return true;
    }
    recover(*last, scheduled_lr());
    return false;
  }

  /// Whether the user wants a line about a step.
  bool has_line(int64_t step) const {
    const std::optional<int64_t>& interval = config_.log_interval.value;
    return interval.value_or(0) != 0 && step % *interval == 0;
  }

  /// Adds a step's result to the epoch's.
  void account(const StepVote::Result& result, int64_t step, double lr) {
    epoch_samples_ += result.samples;
    if (step_.is_good(result)) {
      position_.epoch_loss += result.loss_sum;
      position_.epoch_samples += result.samples;
      bad_in_row_ = 0;
    } else {
      ++bad_in_row_;
      display_.warn("{} not finite in step {}: the step changed nothing", fault_of(result), step);
    }
    if (!keepers_.is_one()) return;
    const double trained = base::seconds_since(epoch_begin_);
    const int64_t interval = config_.log_interval.value.value_or(kLogInterval);
    const bool is_in_interval = interval != 0 && step % interval == 0;
    const DataWait::Means wait = data_wait_.of_epoch(trained);
    RunDisplay::Step line{
        .step = step,
        .total = plan_.total_steps(),
        .epoch = position_.sampler.epoch + 1,
        .loss = {result.loss(), epoch_loss()},
        .lr = lr,
        .images_per_second = static_cast<double>(epoch_samples_) / trained,
        .data_wait_share = wait.share,
        .batch_seconds = {batch_seconds_,
                          std::chrono::duration<double>(step_end_ - epoch_begin_).count() /
                              static_cast<double>(step - first_step_)},
        .data_seconds = {data_seconds_, wait.seconds}};
    if (has_line(step) && task_->counts_training()) {
      line.metrics = task_->training_metrics(std::exchange(line_counts_, {}));
      line.epoch_metrics = task_->training_metrics(position_.epoch_counts);
    }
    display_.step(line, has_line(step));
    const bool is_last = interval != 0 && step == plan_.total_steps();
    if (!is_in_interval && !is_last) return;
    on_folder([&] {
      folder_->log_step(step, position_.sampler.epoch + 1, result.loss(), lr,
                        data_wait_.mean_since_last());
    });
  }

  static std::string fault_of(const StepVote::Result& result) {
    if (result.is_finite()) return "gradients are";
    return fmt::format("the loss of rank {} is", result.first_bad_rank);
  }

  /// After a step whose loss or gradients were not finite: ends the run, or restores the last
  /// checkpoint.
  void recover(const StepVote::Result& result, double lr) {
    const int64_t step = position_.step;
    const std::string what = fmt::format(
        "{} not finite in step {} (epoch {}, learning rate {:.3g}){}", fault_of(result), step,
        position_.sampler.epoch + 1, lr,
        bad_in_row_ >= kMaxBadInRow ? fmt::format(", the last of {} such steps", bad_in_row_)
        : position_.restores >= kMaxRestores
            ? fmt::format(", after {} restores", position_.restores)
            : "");
    const int64_t restores = position_.restores + 1;
    write([&] { writer_->wait(); });
    display_.clear();
    const std::string bytes = on_rank_0([&]() -> std::string {
      const bool has_last = base::exists(folder_->last());
      if (config_.on_nan == "restore" && has_last && restores <= kMaxRestores) {
        return base::read_file(folder_->last());
      }
      folder_->log_end(fault_of(result) + " not finite", step - 1);
      renew_report();
      const std::string last = folder_->last().string();
      throw base::UnavailableError(fmt::format(
          "{}; try a lower learning rate or a warm-up, or look at the data; {}", what,
          has_last ? fmt::format("{} holds the run after step {}", last, writer_->saved_step())
                   : "nothing was saved yet, so there is nothing to restore"));
    });
    const double lr_scale = position_.lr_scale * config_.restore_lr;
    restore(parse_checkpoint(bytes, run_files::kLast), run_files::kLast);
    step_.take_counts();
    line_counts_.clear();
    position_.restores = restores;
    position_.lr_scale = lr_scale;
    write([&] {
      folder_->rewind_log(position_.step, position_.sampler.epoch, position_.epoch_line);
    });
    display_.warn("{}; the run continues from step {} with {:.3g} of the learning rate", what,
                  position_.step, lr_scale);
  }

  // ---- the end of an epoch ---------------------------------------------------------------------

  /// Returns false if a signal arrived, or the time was up, during the evaluation.
  bool finish_epoch(EpochRecord& record) {
    collect_counts();
    const int64_t every = config_.tensorboard.histograms;
    if (folder_ && every > 0 && record.epoch % every == 0) {
      log_histograms(*model_, record.step, *folder_);
    }
    record.train = {{"loss", epoch_loss()}};
    if (task_->counts_training()) {
      for (const Metric& metric : task_->training_metrics(position_.epoch_counts)) {
        record.train.emplace_back(metric.name, metric.value);
      }
    }
    const bool is_whole = loader_.batches_left() == 0;
    if (is_whole) {
      position_.epoch_loss = 0;
      position_.epoch_samples = 0;
      position_.epoch_counts.clear();
    }
    next_ = is_whole ? plan_.end_of_epoch() : loader_.state();
    if (plan_.evaluates(record.epoch)) {
      if (!judge_epoch(record)) return false;
    } else {
      record.seconds = seconds();
      position_.epoch_line = line_of(record);
      if (plan_.saves()) save(next_);
      write([&] { folder_->append(position_.epoch_line); });
      display_.epoch(record);
    }
    position_.sampler = next_;
    return true;
  }

  /// Evaluates after an epoch, keeps the checkpoint if it is one of the best, and logs the epoch.
  /// Returns false if the run is to stop before the epoch is evaluated.
  bool judge_epoch(EpochRecord& record) {
    const bool is_whole = next_.consumed == 0;
    if (is_whole) position_.epoch_line = line_of(record);
    const bool is_due = plan_.saves_after_epoch(next_);
    // An evaluation may take long: save the epoch's training first, whatever ends it.
    if (is_due) save(next_);
    if (!evaluate(record)) return false;
    if (!std::isfinite(find(record.eval, "loss").value_or(0))) {
      display_.warn(
          "the {} loss is not finite: the network computes infinite or undefined numbers; lower "
          "optimizer.lr, or set clip.norm",
          record.eval_split);
    }
    // An evaluation that only max_steps asks for leaves no trace: with a higher limit, the run goes
    // on as if it had not stopped. But a run without any result gets a best.pt.
    const bool is_regular = is_whole && plan_.evaluates_whole(record.epoch);
    BestChange change;
    const auto& chosen = measures_.chosen();
    if (chosen && (is_regular || position_.best.empty())) change = rank_result(record, *chosen);
    if (is_regular) schedule_->observe(*find(record.eval, "loss"));
    record.seconds = seconds();
    const std::string line = line_of(record);
    if (is_regular) position_.epoch_line = line;
    // last.pt must not be older than the best checkpoint.
    const bool is_last = is_due || plan_.stopped_early() || change.write.has_value();
    save(next_, change, /*last=*/is_regular && is_last);
    write([&] { folder_->append(line); });
    renew_report();
    display_.epoch(record);
    if (plan_.stopped_early()) {
      display_.info("ends early: {} evaluations without a better {}", position_.stale_evaluations,
                    measures_.chosen()->name);
    }
    return true;
  }

  /// Compares an evaluation's result with those before it.
  BestChange rank_result(const EpochRecord& record, const Metric& chosen) {
    const auto& [metric, unused, higher, share] = chosen;
    if (std::exchange(position_.best_metric, metric) != metric) {
      // So far, another metric chose.
      position_.best.clear();
      position_.improved_to.reset();
      position_.stale_evaluations = 0;
    }
    const double value = find(record.eval, metric).value_or(0);
    if (improves(value, position_.improved_to, higher, config_.early_stop.min_delta)) {
      position_.improved_to = value;
      position_.stale_evaluations = 0;
    } else {
      ++position_.stale_evaluations;
    }
    const auto loss = find(record.eval, loss_beside(metric));
    const Checkpoint::Best result{
        .value = value, .loss = loss, .epoch = record.epoch, .step = record.step};
    return add_result(position_.best, result, config_.checkpoint.keep_best.count, higher);
  }

  /// Fills in the record's results. If the evaluation throws, saves the epoch's training first.
  /// Returns false if the run is to stop; there are no results then.
  bool evaluate(EpochRecord& record) {
    record.eval.clear();
    record.eval_split = eval_split();
    std::optional<Evaluation> own;
    std::optional<Evaluation> average;
    try {
      own = add_results(record, "");
      if (!own) return false;
      if (Ema* const ema = step_.ema(); ema != nullptr) {
        const Ema::InPlace averages(*ema);
        average = add_results(record, kAverage);
        if (!average) return false;
      }
    } catch (const base::UserError&) {
      save_unevaluated();
      throw;
    } catch (const ComponentError&) {
      save_unevaluated();
      throw;
    } catch (const QuietExit&) {
      save_unevaluated();
      throw;
    }
    // After the handlers above: they save, which needs the disk that this may find full.
    channel_.phase("results", kPhaseAllowance);
    write([&] {
      evaluator_.write(*own, "", record.step, *folder_);
      if (average) evaluator_.write(*average, kAverage, record.step, *folder_);
    });
    return true;
  }

  void save_unevaluated() {
    save(next_);
    write([&] { writer_->wait(); });
  }

  /// Returns nothing if the run is to stop.
  std::optional<Evaluation> add_results(EpochRecord& record, const std::string& prefix) {
    const auto now = [&] { return wishes(); };
    channel_.phase(kEvaluation, kPhaseAllowance);
    prepare_statistics(config_, inputs_, *task_, *model_, to_device_, loader_options(),
                       resume_.seed, now);
    const auto on_batch = [&](int64_t batch, int64_t batches) {
      if (batch > 0) channel_.phase_goes_on(kEvaluation);
      offer_resume();
      display_.evaluation(record, plan_.total_steps(), batch, batches);
    };
    const Pictures pictures = !keepers_.is_one() ? Pictures::kNone
                              : prefix.empty()   ? Pictures::kFirstAndWorst
                                                 : Pictures::kFirst;
    Evaluation result =
        placing([&] { return fmt::format("evaluation after step {}", record.step); },
                [&] { return evaluator_.evaluate(now, on_batch, pictures); });
    if (result.wishes.ends_run()) {
      stop_wishes_ = result.wishes;
      record.eval.clear();
      return std::nullopt;
    }
    record.eval.emplace_back(prefix + "loss", result.loss);
    for (const Metric& metric : result.metrics) {
      record.eval.emplace_back(prefix + metric.name, metric.value);
    }
    if (!prefix.empty()) return result;
    if (std::exchange(remark_, result.remark) != result.remark && !result.remark.empty()) {
      display_.info("{}", result.remark);
    }
    if (std::exchange(left_out_, result.skipped) != result.skipped && result.skipped > 0) {
      display_.warn("evaluation left out {}", base::counted(result.skipped, "damaged sample"));
    }
    return result;
  }

  /// Writes the first batch after augmentation to pictures/first_batch-000000000000.png, and its
  /// classes to first_batch.csv.
  void picture_first_batch(const data::Batch& batch) {
    if (!keepers_.is_one() || position_.step > 0 || batch.size() == 0) return;
    data::SampleRandom random = random_of_batch();
    const data::Batch augmented = task_->augment(to_device_(batch), random);
    const auto sheet = contact_sheet(augmented, inputs_.train_set->normalization());
    if (!sheet) return;
    const auto labels = task_->targets_are_classes()
                            ? sheet_labels(augmented, class_names(*inputs_.train_set))
                            : std::nullopt;
    try {
      folder_->write_picture("first_batch", 0, *sheet);
      if (labels) folder_->replace_file(run_files::kFirstBatch, *labels);
    } catch (const base::Error& error) {  // a picture is not worth the run
      spdlog::warn("{}", error.what());
    }
  }

  void renew_report() {
    if (report_) report_->renew();
  }

  // ---- checkpoints -----------------------------------------------------------------------------

  /// Adds the counts of all ranks since the last call to those of the epoch and of the next line.
  void collect_counts() {
    at::Tensor counts = step_.take_counts();
    dist::all_reduce(counts);
    counts = counts.cpu();
    dist::throw_if_aborted();  // the counts are undefined then
    const auto* const first = counts.const_data_ptr<int64_t>();
    for (auto* const sums : {&position_.epoch_counts, &line_counts_}) {
      sums->resize(static_cast<size_t>(counts.numel()));
      for (size_t i = 0; i < sums->size(); ++i) (*sums)[i] += first[i];
    }
  }

  /// Saves the run in the background. Every rank calls it and contributes the state of its random
  /// number generator.
  /// @param last whether to write last.pt, besides what `change` asks for
  void save(const data::SamplerState& sampler, const BestChange& change = {}, bool last = true) {
    if (!last && !change.write) return;
    channel_.phase("checkpoint", kPhaseAllowance);
    if (sampler.consumed > 0) collect_counts();
    Checkpoint checkpoint = state_.add_to(position_);
    write([&] {
      checkpoint.sampler = sampler;
      checkpoint.seconds = seconds();
      checkpoint.config = config_text_;
      checkpoint.classes = inputs_.train_set->class_names();
      checkpoint.category_ids = data::category_ids(*inputs_.train_set);
      folder_->write_lines();
      writer_->save(checkpoint, change, last);
    });
    if (!last) return;
    saved_ = Clock::now();
    has_saved_ = true;
  }

  // ---- the end ---------------------------------------------------------------------------------

  /// @param sampler where the run continues
  int stop(const data::SamplerState& sampler) {
    save(sampler);
    end_profile();
    const int signal = stop_wishes_.stop_signal;
    const std::string name = signal != 0 ? base::signal_name(signal) : "max_time";
    write([&] {
      writer_->wait();
      folder_->log_end(name, position_.step, seconds());
    });
    renew_report();
    if (is_rank_0()) {
      display_.warn("stopped by {} after step {}; {} has the run; to resume: {}", name,
                    position_.step, folder_->last().string(), resume_command(folder_->path()));
    }
    return signal == SIGINT ? base::kExitSignalBase + signal : base::kExitPreempted;
  }

  void finish(EpochRecord& record) {
    end_profile();
    record.seconds = seconds();
    if (record.epoch == 0) record.epoch = position_.sampler.epoch, record.step = position_.step;
    const Metric metric = measures_.chosen().value_or(Metric());
    std::optional<Checkpoint::Best> best;
    if (!position_.best.empty()) best = position_.best.front();
    write([&] {
      writer_->wait();
      folder_->log_end("finished", position_.step);
      const ResultRecord result{.best_metric = metric.name,
                                .best_value = best ? best->value : std::nan(""),
                                .best_epoch = best ? best->epoch : 0,
                                .higher_is_better = metric.higher_is_better,
                                .last = record,
                                .world_size = dist::world_size(),
                                .seed = resume_.seed,
                                .sync_batchnorm = config_.sync_batchnorm};
      folder_->replace_file(run_files::kResult, text_of(result));
    });
    renew_report();
    if (!is_rank_0()) return;
    display_.result(record, best, folder_->path());
    const bool has_network = best && measures_.chosen();
    if (has_network && inputs_.eval_split == data::Split::kVal && inputs_.has_test_set) {
      // Without a best.pt (checkpoint.keep_best.count: 0), the command takes last.pt.
      const bool has_file = base::exists(folder_->path() / run_files::kBest);
      spdlog::info("to evaluate {} on the test split: {}",
                   has_file ? run_files::kBest : run_files::kLast,
                   command_line("eval", folder_->path()));
    }
  }

  const Config& config_;
  const std::string name_;
  const Inputs& inputs_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point counted_from_ = begin_;  ///< position_.seconds covers the time before
  const StopSignals signals_;
  const at::Device device_;
  AgentChannel channel_;
  const Keepers keepers_;
  ResumeState resume_;
  const std::string config_text_;  ///< with the seed that is used
  data::Loader loader_;
  const std::shared_ptr<models::Model> model_;
  const std::unique_ptr<Task> task_;
  const Measures measures_;
  const BatchToDevice to_device_;
  TrainingStep step_;
  const Evaluator evaluator_;
  const std::unique_ptr<Schedule> schedule_;
  RunState state_;
  const RunPlan plan_;
  RunDisplay display_;
  Profiler profiler_;
  std::unique_ptr<RunFolder> folder_;         ///< null unless this rank is a keeper
  std::unique_ptr<CheckpointWriter> writer_;  ///< null unless this rank is a keeper
  std::unique_ptr<ReportWriter> report_;      ///< null unless this rank is a keeper
  bool continues_epoch_ = false;
  bool is_finished_ = false;
  bool is_first_step_ = true;
  bool has_told_of_signal_ = false;
  bool has_saved_ = false;  ///< whether a last.pt was begun, by this run or one that it continues
  bool offers_resume_ = false;
  std::string remark_;    ///< of the last evaluation
  int64_t left_out_ = 0;  ///< damaged samples of the last evaluation
  DataWait data_wait_;
  const GpuMeter gpu_meter_{device_};
  Clock::time_point epoch_begin_;     ///< of this epoch's training
  Clock::time_point step_end_;        ///< of the last step, or the epoch's begin
  double batch_seconds_ = 0;          ///< of the last step
  double data_seconds_ = 0;           ///< of batch_seconds_, the wait for the batch
  int64_t first_step_ = 0;            ///< steps before this epoch's training
  std::vector<int64_t> line_counts_;  ///< of all ranks since the last line about a step
  OwnTimer own_timer_;                ///< of this epoch's training
  /// How far the run is: a checkpoint without tensors, in the epoch `sampler.epoch`.
  Checkpoint position_;
  data::SamplerState next_;    ///< where the run continues after the epoch
  Wishes stop_wishes_;         ///< why it stops
  int64_t bad_in_row_ = 0;     ///< successive steps that were skipped
  int64_t epoch_samples_ = 0;  ///< of all ranks in this epoch, since the program started
  Clock::time_point saved_ = Clock::now();
};

}  // namespace

int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(config.deterministic, /*warn_only=*/false);
  context.setDeterministicCuDNN(config.deterministic);
  context.setBenchmarkCuDNN(config.cudnn_benchmark.value.value_or(!config.deterministic &&
                                                                  !inputs.train_set->sizes_vary()));
  context.setAllowTF32CuBLAS(config.tf32);
  context.setAllowTF32CuDNN(config.tf32);
  auto trainer = explain_out_of_memory(MemoryUse::kSetup,
                                       [&] { return Trainer(config, config_text, name, inputs); });
  return explain_out_of_memory(MemoryUse::kLater, [&] { return trainer.run(); });
}

}  // namespace syncbn::train
