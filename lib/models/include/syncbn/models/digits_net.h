#pragma once

#include <memory>

#include <syncbn/models/model.h>

namespace syncbn::models {

struct DigitsNetOptions {
  int64_t width = 16;  ///< channels of the first convolution
  double dropout = 0;  ///< probability that training drops an input of the last layer

  static void describe(config::Schema<DigitsNetOptions>& schema);
};

/// A network for small images, such as the digits' 8 x 8: three 3x3 convolutions, each with batch
/// norm and ReLU, and a linear layer.
/// @throws base::UserError for images below 2 x 2.
std::shared_ptr<Model> digits_net(const ModelArgs& args, const DigitsNetOptions& options = {});

}  // namespace syncbn::models
