#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

constexpr double kMaxRate = 1e6;  ///< upper bound on options: anything above is a typo

/// The learning rate of a group: `0.01`, or `0.1x` of the optimizer's.
struct GroupRate {
  double value = 1;
  bool is_factor = true;

  double rate(double lr) const { return is_factor ? lr * value : value; }
};

/// An item of `groups`.
struct ParameterGroup {
  std::string match;
  std::optional<GroupRate> lr = {};
  std::optional<double> weight_decay = {};

  static void describe(config::Schema<ParameterGroup>& schema);
};

}  // namespace syncbn::train

template <>
struct syncbn::config::Codec<syncbn::train::GroupRate> {
  static std::string type_name() { return "number or factor"; }
  static bool read(const Value& value, train::GroupRate& out, const std::string& path,
                   Faults& faults);
  static Value write(const train::GroupRate& in);
  static Value json_schema(Definitions& definitions);
};

namespace syncbn::train {

/// The options that every optimizer has.
struct CommonOptions {
  double lr = 1e-3;
  double weight_decay = 0;
  std::vector<std::string> no_decay = {};
  std::vector<ParameterGroup> groups = {};
  double layer_decay = 1;
  std::optional<int64_t> lr_batch = {};
};

template <class Options>
void describe_common(config::Schema<Options>& schema, const std::string& weight_decay) {
  schema.field("lr", &Options::lr, "learning rate")
      .positive_up_to(kMaxRate)
      .other_names({"learning_rate"});
  schema
      .field("lr_batch", &Options::lr_batch,
             "batch size that lr is for: it is multiplied by global batch / lr_batch; null: lr is "
             "used as it is")
      .between(1, kMaxRate)
      .unit("samples");
  schema.field("weight_decay", &Options::weight_decay, weight_decay).between(0, kMaxRate);
  schema.field("no_decay", &Options::no_decay,
               "parameters without weight decay: norm, bias, or wildcards on names such as embed*");
  schema.field(
      "groups", &Options::groups,
      "parameters with their own rates: match (as in no_decay; the first group that matches "
      "counts), lr (0.01, or 0.1x of the optimizer's), weight_decay");
  schema
      .field("layer_decay", &Options::layer_decay,
             "factor of the learning rate from each layer to the one before it")
      .positive_up_to(1);
}

template <class Options>
void describe_fused(config::Schema<Options>& schema) {
  schema.field("fused", &Options::fused,
               "update in one pass over memory; false: operation by operation, which rounds as "
               "Python's default does");
}

template <class Options>
void describe_betas(config::Schema<Options>& schema) {
  schema.field("betas", &Options::betas, "decay of the two running averages").length(2).fraction();
}

template <class Options>
void describe_eps(config::Schema<Options>& schema) {
  schema.field("eps", &Options::eps, "added to the denominator").positive_up_to(kMaxRate);
}

template <class Options>
void describe_momentum(config::Schema<Options>& schema) {
  schema.field("momentum", &Options::momentum, "share of the previous update that is kept")
      .fraction();
}

}  // namespace syncbn::train
