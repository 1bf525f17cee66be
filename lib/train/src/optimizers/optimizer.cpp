#include <syncbn/train/optimizer.h>

#include "optimizers/kinds.h"

namespace syncbn::train {

OptimizerKind::Registry& OptimizerKind::registry() {
  static Registry registry = [] {
    Registry made("optimizer");
    add_sgd(made);
    add_adam(made);
    add_rmsprop(made);
    add_lamb(made);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train
