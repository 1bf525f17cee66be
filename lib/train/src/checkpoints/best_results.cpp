#include "checkpoints/best_results.h"

#include <algorithm>
#include <cmath>

#include "records/log_record.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

/// False if either is missing. NaN is the highest loss.
bool is_lower_loss(std::optional<double> a, std::optional<double> b) {
  return a && b && (*a < *b || (std::isnan(*b) && !std::isnan(*a)));
}

}  // namespace

std::string loss_beside(const std::string& metric) {
  return (metric.starts_with(kAverage) ? kAverage : std::string()) + "loss";
}

BestChange add_result(std::vector<Checkpoint::Best>& best, const Checkpoint::Best& result,
                      int64_t count, bool higher_is_better) {
  BestChange change;
  if (std::isnan(result.value)) return change;
  const auto place = std::ranges::find_if(best, [&](const Checkpoint::Best& other) {
    if (result.value == other.value) return is_lower_loss(result.loss, other.loss);
    return (result.value > other.value) == higher_is_better;
  });
  change.is_best = place == best.begin();
  if (place == best.end() && std::ssize(best) >= std::max<int64_t>(count, 1)) return change;
  if (change.is_best && count > 1 && !best.empty()) {
    change.aside = best.front().file = run_files::best_name(best.front().step);
  }
  const std::string file = change.is_best ? run_files::kBest : run_files::best_name(result.step);
  best.insert(place, result)->file = file;
  if (count > 0) change.write = file;
  if (std::ssize(best) > std::max<int64_t>(count, 1)) {
    // best.pt is replaced, not removed.
    if (best.back().file != run_files::kBest) change.remove = best.back().file;
    best.pop_back();
  }
  return change;
}

bool improves(double value, std::optional<double> former, bool higher_is_better, double min_delta) {
  if (std::isnan(value) || !former) return !std::isnan(value);
  return higher_is_better ? value > *former + min_delta : value < *former - min_delta;
}

}  // namespace syncbn::train
