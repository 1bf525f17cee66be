#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <syncbn/data/dataset.h>

namespace syncbn::data {

/// The samples `indices` of a data set, in this order, as a data set of their own. Samples of a
/// SampleDataset are made one at a time here as well.
/// @throws base::InternalError for an index outside the data set.
std::shared_ptr<const Dataset> subset(std::shared_ptr<const Dataset> dataset,
                                      std::vector<int64_t> indices);

/// Two lists that have each index of a data set once.
struct HeldOut {
  std::vector<int64_t> train;
  std::vector<int64_t> held_out;
};

/// Holds out a share of each class, evenly spaced: of 100 samples of a class and 0.2, every fifth.
/// The same for every seed and number of ranks.
/// @param labels of all samples; if empty, the samples count as one class of `size`
HeldOut hold_out(int64_t size, std::span<const int64_t> labels, double share);

}  // namespace syncbn::data
