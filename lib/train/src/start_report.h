#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/data/loader.h>
#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>
#include <syncbn/train/schedule.h>

namespace syncbn::train {

/// Logs the remarks of data sets as warnings, each once.
/// @param skips whether the run leaves out damaged samples
/// @param reads_all whether the caller reads all samples: leaves out remarks on unreadable ones
/// @return whether one of them is a fault
bool warn_of_remarks(const std::vector<std::shared_ptr<const data::Dataset>>& sets, bool skips,
                     bool reads_all = false);

/// How long to look at files at the start of a run.
inline constexpr std::chrono::milliseconds kShortSurvey{500};

/// Logs what data::survey() finds as warnings.
void warn_of_survey(const data::Dataset& set, data::Split split,
                    std::chrono::milliseconds limit = kShortSurvey, const std::string& name = "");

/// Warns of a warm-up as long as the run. Refuses batches, or parts of them, of a single sample if
/// the network's batch norm cannot train on one: a last batch of one would otherwise end the run
/// after hours.
/// @param ranks of the run
/// @param steps of the whole run
/// @param remaining steps that it has yet to take
/// @throws base::UserError on every rank; only rank 0 warns
void check_plan(const Config& config, const Inputs& inputs, const data::Loader& loader,
                int64_t ranks, const Schedule& schedule, int64_t steps, int64_t remaining,
                models::Model& model);

/// Logs what a run is about to do: data, ranks, batch, classes. Warns of what looks like a mistake.
void report_start(const Config& config, const std::string& name, const Inputs& inputs,
                  const models::Model& model, int64_t seed);

}  // namespace syncbn::train
