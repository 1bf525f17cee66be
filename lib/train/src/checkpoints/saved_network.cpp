#include "checkpoints/saved_network.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/models/weights.h>

#include "checkpoints/sealed_archive.h"
#include "common/naming.h"
#include "common/rank_0.h"
#include "records/run_files.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// Loads the weights in a file of Python's into the model of each rank.
void load_python_weights(const std::string& path, bool average, models::Model& model) {
  do_on_rank_0([&] {
    const models::StateDict weights = models::read_state_dict(path, average ? "model_ema" : "");
    naming("cannot load " + path, [&] { models::load_state_dict(model, weights); });
  });
  for (const auto& item : models::state_dict(model)) {
    at::Tensor tensor = item.value().detach();
    dist::broadcast(tensor, 0);
  }
}

}  // namespace

fs::path checkpoint_file(const std::string& command, const Config& config,
                         const std::string& name) {
  if (!config.resume.empty() && config.resume != "auto") return models::weights_file(config.resume);
  const fs::path folder = run_files::newest(config.run_dir, name);
  for (const char* file : {run_files::kBest, run_files::kLast}) {
    if (base::exists(folder / file)) return folder / file;
  }
  throw base::UserError(fmt::format(
      "{}: {} has no checkpoint; name a file with --resume, or a run's folder with --run_dir",
      command, folder.string()));
}

SavedNetwork::SavedNetwork(const std::string& command, const Config& config,
                           const std::string& name) {
  path_ = on_rank_0([&] { return checkpoint_file(command, config, name).string(); });
  const std::string bytes = on_rank_0([&] {
    std::string all = load_file(path_);
    return is_of_python(all) ? "" : all;
  });
  if (bytes.empty()) return;
  checkpoint_ = report_on_rank_0([&] { return parse_checkpoint(bytes, path_); });
}

void SavedNetwork::load_into(models::Model& model, bool average) const {
  if (!checkpoint_) return load_python_weights(path_, average, model);
  if (average && !has_average()) {
    report_on_rank_0([&] {
      throw base::UserError(fmt::format("{} has no moving average; leave --ema out", path_));
    });
  }
  report_on_rank_0([&] {
    naming("cannot load " + path_,
           [&] { load_model(average ? checkpoint_->ema : checkpoint_->model, model); });
  });
}

}  // namespace syncbn::train
