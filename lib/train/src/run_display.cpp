#include "run_display.h"

#include <syncbn/base/env.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/process_group.h>

#include <system_error>
#include <vector>

#include "common/rank_0.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

std::string gpu_part(const GpuLoad& load) {
  return fmt::format("GPU {}{}  ",
                     load.utilization ? fmt::format("{:.0f} %, ", 100 * *load.utilization) : "",
                     base::format_bytes(static_cast<uint64_t>(load.memory_bytes)));
}

}  // namespace

RunDisplay::RunDisplay(const Config& config, const Measures& measures, AgentChannel& channel,
                       at::Device device)
    : config_(config), measures_(measures), progress_(channel), memory_(device) {}

bool RunDisplay::clear() {
  if (is_rank_0()) progress_.clear();
  return is_rank_0();
}

void RunDisplay::step(const Step& step, bool is_logged) {
  if (!is_rank_0()) return;
  std::string averages;  // as in the lines of PyTorch's ImageNet example
  const auto text = [&] {
    return fmt::format("epoch {}/{}  loss {}{}  {}lr {:.3g}  {}  data wait {:.1f} %  {}",
                       step.epoch, config_.epochs, shown({}, step.loss.last), averages, headline_,
                       step.lr, rate(step.images_per_second), 100 * step.data_wait_share,
                       memory_.text());
  };
  progress_.show(step.step, step.total, text, /*as_line=*/!config_.log_interval.value);
  if (!is_logged) return;
  averages = fmt::format(" ({})", shown({}, step.loss.mean));
  for (size_t i = 0; i < step.metrics.size(); ++i) {
    const Metric& metric = step.metrics[i];
    averages += fmt::format("  {} {} ({})", metric.name, shown(metric, metric.value),
                            shown(metric, step.epoch_metrics[i].value));
  }
  averages +=
      fmt::format("  batch {:.3f} s ({:.3f} s)  data {:.3f} s ({:.3f} s)", step.batch_seconds.last,
                  step.batch_seconds.mean, step.data_seconds.last, step.data_seconds.mean);
  progress_.log(step.step, step.total, text());
}

void RunDisplay::evaluation(const EpochRecord& record, int64_t total_steps, int64_t batch,
                            int64_t batches) {
  if (!is_rank_0()) return;
  progress_.show(record.step, total_steps, [&] {
    return fmt::format("epoch {}/{}  {} {}/{}  {}{}", record.epoch, config_.epochs,
                       record.eval_split, batch, batches, headline_, memory_.text());
  });
}

void RunDisplay::epoch(const EpochRecord& record) {
  if (!record.eval.empty()) headline_ = measures_.headline(record.eval_split, record.eval);
  // A run that resumed after the epoch's last step has taken none in it.
  const std::string speed =
      record.images_per_second > 0
          ? fmt::format("{}  data wait {:.1f} %  ", rate(record.images_per_second),
                        100 * record.data_wait_share)
          : "";
  info("epoch {:{}d}/{}  {}{}lr {:.3g}  {}{}{}", record.epoch,
       std::to_string(config_.epochs).size(), config_.epochs,
       measures_.line_part("train", record.train),
       measures_.line_part(record.eval_split, record.eval), record.lr, speed,
       record.gpu ? gpu_part(*record.gpu) : "", base::format_seconds(record.seconds));
}

void RunDisplay::result(const EpochRecord& last, const std::optional<Checkpoint::Best>& best,
                        const fs::path& folder) {
  const auto& metric = measures_.chosen();
  const std::string time = base::format_seconds(last.seconds);
  if (!metric) {
    info("{}{}in {}; {} has the network", measures_.line_part("train", last.train),
         measures_.line_part(last.eval_split, last.eval), time,
         (folder / run_files::kLast).string());
  } else if (!best) {
    warn("{} has been no number in all evaluations: there is no best.pt", metric->name);
  } else {
    info("{} {} {}, best {} (epoch {}), in {}", last.eval_split, metric->name,
         shown(*metric, find(last.eval, metric->name).value_or(0)), shown(*metric, best->value),
         best->epoch, time);
  }
}

std::string rate(double images_per_second) {
  return images_per_second < 10 ? fmt::format("{:.2g} images/s", images_per_second)
                                : fmt::format("{:.0f} images/s", images_per_second);
}

std::string command_line(const std::string& command, const fs::path& run) {
  std::error_code ignored;
  const fs::path program = base::program_file();
  const auto folder = fs::current_path(ignored);
  std::string near = program.lexically_proximate(folder).string();
  if (near.find('/') == near.npos) near.insert(0, "./");
  std::vector<std::string> words = {near.starts_with("..") ? program.string() : near};
  if (!command.empty()) words.push_back(command);
  const std::string name = run.string();
  // The path must not look like an option or KEY=VALUE.
  const bool is_odd =
      name.starts_with('-') || (name.find('/') == name.npos && name.find('=') != name.npos);
  words.push_back(is_odd ? "./" + name : name);
  return base::shell_quoted(words);
}

std::string resume_command(const fs::path& run) {
  const int64_t ranks = dist::world_size();
  const auto of_node = base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20);
  if (of_node && *of_node < ranks) {
    return fmt::format("the same command with --config {} in place of its --config",
                       base::shell_quoted({run.string()}));
  }
  return command_line("", run) + (ranks == 1 ? "" : fmt::format(" --nproc_per_node={}", ranks));
}

}  // namespace syncbn::train
