#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/data/loader.h>
#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>
#include <syncbn/train/task.h>

#include "records/log_record.h"
#include "records/mistakes.h"
#include "records/run_folder.h"
#include "step/model.h"
#include "step/stopping.h"
#include "tasks/added_metrics.h"

namespace syncbn::train {

/// The results on a set of samples, equal on all ranks.
struct Evaluation {
  double loss = 0;  ///< mean over samples, or over pixels
  std::vector<Metric> metrics;
  std::string remark;             ///< Task::remark()
  std::vector<Table> tables;      ///< Task::tables()
  std::vector<Task::Seen> seen;   ///< this rank's first samples; empty with Pictures::kNone
  std::vector<Task::Seen> worst;  ///< this rank's with the highest losses; only with kFirstAndWorst
  std::vector<Mistake> mistakes;  ///< worst_mistakes()
  int64_t samples = 0;
  int64_t skipped = 0;  ///< damaged samples that were left out
  Wishes wishes = {};   ///< of any rank; if they end the run, the results are incomplete
};

/// Returns this rank's current wishes.
using GetWishes = std::function<Wishes()>;

/// Which of this rank's samples an evaluation keeps for pictures.
enum class Pictures { kNone, kFirst, kFirstAndWorst };

/// Called before each batch of this rank, with the number of batches before it and in total.
using OnBatch = std::function<void(int64_t batch, int64_t batches)>;

/// Reads each sample of a set once, divided between `num_replicas` ranks: in batches, or one at a
/// time if sizes vary.
/// @param options of training; drop_last is ignored
data::Loader each_once(const std::shared_ptr<const data::Dataset>& set, data::LoaderOptions options,
                       int64_t num_replicas, int64_t rank);

/// Evaluates a network on the run's evaluation split, divided between the ranks: each sample once.
/// Not thread-safe.
class Evaluator {
 public:
  /// @param loader_options of training
  /// @throws base::UserError on rank 0, QuietExit on the others, when data, task and network do not
  ///   suit each other
  Evaluator(const Config& config, const Inputs& inputs, models::Model& model,
            const BatchToDevice& to_device, const data::LoaderOptions& loader_options);

  const Task& task() const { return *task_; }

  /// Every rank calls it.
  /// @param wishes called before each batch
  /// @throws base::UserError on the ranks with a damaged sample, QuietExit on the others
  Evaluation evaluate(const GetWishes& wishes, const OnBatch& on_batch,
                      Pictures pictures = Pictures::kNone) const;

  /// Writes tables, pictures and mistakes. Keepers call it.
  /// @param prefix of the results' names; with a prefix, mistakes are not written
  void write(const Evaluation& evaluation, const std::string& prefix, int64_t step,
             RunFolder& folder) const;

 private:
  void write_mistakes(const std::vector<Mistake>& mistakes, RunFolder& folder) const;

  const Config& config_;
  const Inputs& inputs_;
  models::Model& model_;
  const std::unique_ptr<Task> task_;  ///< of the evaluation split
  const AddedMetrics added_;
  const BatchToDevice& to_device_;
  data::LoaderOptions loader_options_;
  mutable std::map<int64_t, std::string> damaged_;  ///< samples that a warning has named
};

/// Updates batch norm's running statistics before an evaluation, as the configuration asks for.
/// Every rank calls it; it may leave the model in training mode. Incomplete if a rank wishes to end
/// the run.
void prepare_statistics(const Config& config, const Inputs& inputs, const Task& task,
                        models::Model& model, const BatchToDevice& to_device,
                        const data::LoaderOptions& loader_options, int64_t seed,
                        const GetWishes& wishes);

}  // namespace syncbn::train
