#pragma once

#include <cstdint>
#include <memory>

#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>

namespace syncbn::data {

/// Options of `type: synthetic`.
struct SyntheticOptions {
  int64_t size = 1024;
  int64_t test_size = 256;
  int64_t channels = 3;
  int64_t height = 224;
  int64_t width = 224;
  int64_t classes = 10;
  int64_t seed = 0;

  static void describe(config::Schema<SyntheticOptions>& schema);
};

/// Images made from (seed, split, sample number) alone, whatever the order they are asked in:
/// Gaussian noise around a mean that tells the class. Labels are the sample's number modulo the
/// number of classes. Nothing is held in memory but the labels.
std::shared_ptr<const Dataset> make_synthetic(const SyntheticOptions& options, Split split);

}  // namespace syncbn::data
