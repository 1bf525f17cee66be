#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

constexpr double kMaxRate = 1e6;  ///< upper bound on options; more is a typing error

/// The options that every optimizer has.
struct CommonOptions {
  double lr = 1e-3;
  double weight_decay = 0;
};

template <class Options>
void describe_common(config::Schema<Options>& schema, const std::string& weight_decay) {
  schema.field("lr", &Options::lr, "learning rate").above(0).at_most(kMaxRate);
  schema.field("weight_decay", &Options::weight_decay, weight_decay).between(0, kMaxRate);
}

template <class Options>
void describe_fused(config::Schema<Options>& schema) {
  schema.field("fused", &Options::fused,
               "update in one pass over memory; false: operation by operation, which rounds as "
               "Python's default does");
}

template <class Options>
void describe_betas(config::Schema<Options>& schema) {
  schema.field("betas", &Options::betas, "decay of the two running averages")
      .length(2)
      .at_least(0)
      .below(1);
}

template <class Options>
void describe_eps(config::Schema<Options>& schema) {
  schema.field("eps", &Options::eps, "added to the denominator").above(0).at_most(kMaxRate);
}

template <class Options>
void describe_momentum(config::Schema<Options>& schema) {
  schema.field("momentum", &Options::momentum, "share of the previous update that is kept")
      .at_least(0)
      .below(1);
}

}  // namespace syncbn::train
