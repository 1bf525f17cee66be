#include <syncbn/train/optimizer.h>

#include "optimizers/adamw.h"
#include "optimizers/sgd.h"

namespace syncbn::train {

OptimizerKind::Registry& OptimizerKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<SgdOptions>("sgd", "stochastic gradient descent, as torch.optim.SGD", make_sgd);
    made.add<AdamwOptions>("adamw", "Adam with decoupled weight decay, as torch.optim.AdamW",
                           make_adamw);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train
