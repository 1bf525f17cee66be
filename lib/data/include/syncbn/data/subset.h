#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <syncbn/data/dataset.h>

namespace syncbn::data {

/// The samples `indices` of a data set, in this order, as a data set: a SampleDataset or BoxDataset
/// if `dataset` is one.
/// @throws base::InternalError for an index outside the data set.
std::shared_ptr<const Dataset> subset(std::shared_ptr<const Dataset> dataset,
                                      std::vector<int64_t> indices);

/// Two lists that together have each index of a data set once.
struct HeldOut {
  std::vector<int64_t> train;
  std::vector<int64_t> held_out;
};

/// Holds out a share of each class, evenly spaced: for 0.2, every fifth sample of a class. Does not
/// depend on the seed or the number of ranks.
/// @param labels of all samples; if empty, the samples count as one class of `size`
HeldOut hold_out(int64_t size, std::span<const int64_t> labels, double share);

}  // namespace syncbn::data
