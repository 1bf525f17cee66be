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

/// Images computed from (seed, split, index): uniform noise around a mean that depends on the
/// class. The label is the index modulo the number of classes. Only labels are kept in memory.
std::shared_ptr<const Dataset> make_synthetic(const SyntheticOptions& options, Split split);

}  // namespace syncbn::data
