#include <syncbn/train/optimizer.h>

#include "optimizers/kinds.h"

namespace syncbn::train {

OptimizerKind::Registry& OptimizerKind::registry() {
  static Registry registry("optimizer", {add_sgd, add_adam, add_rmsprop, add_lamb});
  return registry;
}

}  // namespace syncbn::train
