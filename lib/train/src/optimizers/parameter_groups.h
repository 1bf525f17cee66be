#pragma once

#include <optional>
#include <string>
#include <vector>

#include <syncbn/train/optimizer.h>

namespace syncbn::train {

constexpr double kMaxRate = 1e6;  ///< upper bound on options; more is a typing error

/// An item of an optimizer's `groups`.
struct GroupOptions {
  std::string match;
  std::string lr = "1x";
  std::optional<double> weight_decay;

  static void describe(config::Schema<GroupOptions>& schema);
};

/// Options that every optimizer has.
struct CommonOptions {
  double lr = 0.1;
  double weight_decay = 0;
  std::vector<std::string> no_decay;
  std::vector<GroupOptions> groups;
  double layer_decay = 1;
  std::optional<int64_t> lr_batch;

  /// @param weight_decay_help what it does in this optimizer
  template <class Options>
  static void describe(config::Schema<Options>& schema, const std::string& weight_decay_help) {
    schema.field("lr", &Options::lr, "learning rate").above(0).at_most(kMaxRate);
    schema.field("weight_decay", &Options::weight_decay, weight_decay_help).between(0, kMaxRate);
    schema.field("no_decay", &Options::no_decay,
                 "parameters without weight decay: norm (weights of one dimension), bias, or "
                 "patterns of names, such as layer1.*");
    schema.field("groups", &Options::groups,
                 "options of some parameters; the first group that matches a name counts");
    schema
        .field("layer_decay", &Options::layer_decay,
               "factor of the learning rate from each layer to the one before it; layers are what "
               "names begin with: conv1, layer1, ..., fc")
        .above(0)
        .at_most(1);
    schema
        .field("lr_batch", &Options::lr_batch,
               "the global batch that lr is for: another one scales lr in proportion; null: never")
        .at_least(1)
        .unit("samples");
  }
};

/// How one parameter is updated.
struct ParameterOptions {
  std::optional<double> lr;  ///< while the optimizer's is `base_lr`, to which it stays proportional
  double lr_factor = 1;
  double weight_decay = 0;

  double rate(double base_lr, double lr_now) const {
    if (!lr) return lr_now * lr_factor;
    return (lr_now == base_lr ? *lr : *lr * (lr_now / base_lr)) * lr_factor;
  }
  bool operator==(const ParameterOptions&) const = default;
};

/// The options of each parameter.
/// @throws base::UserError for a pattern that matches no parameter, and for a malformed lr.
std::vector<ParameterOptions> parameter_options(const CommonOptions& options,
                                                const NamedTensors& parameters);

}  // namespace syncbn::train
