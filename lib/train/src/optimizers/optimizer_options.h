#pragma once

#include <syncbn/config/schema.h>

namespace syncbn::train {

constexpr double kMaxRate = 1e6;  // anything above is a typing error

/// The options that all optimizers have.
template <class Options>
void describe_common(config::Schema<Options>& schema) {
  schema.field("lr", &Options::lr, "learning rate").above(0).at_most(kMaxRate);
  schema.field("fused", &Options::fused,
               "update in one pass over memory; false: operation by operation, which rounds as "
               "Python's default does");
}

}  // namespace syncbn::train
