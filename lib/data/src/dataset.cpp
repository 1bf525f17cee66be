#include <syncbn/data/dataset.h>

#include <syncbn/data/digits.h>
#include <syncbn/data/synthetic.h>

namespace syncbn::data {

std::string to_string(Split split) {
  return split == Split::kTrain ? "train" : "test";
}

DatasetKind::Registry& DatasetKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<DigitsOptions>("digits", "UCI's handwritten digits, 1 x 8 x 8, ten classes",
                            load_digits);
    made.add<SyntheticOptions>("synthetic", "random images with a learnable class signal",
                               make_synthetic);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::data
