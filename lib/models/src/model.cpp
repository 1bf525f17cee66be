#include <syncbn/models/model.h>

#include <syncbn/models/digits_net.h>
#include <syncbn/models/resnet.h>

namespace syncbn::models {

ModelKind::Registry& ModelKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<DigitsNetOptions>("digits", "three convolutions and a linear layer, for tiny images",
                               [](const DigitsNetOptions& options, const ModelArgs& args) {
                                 return digits_net(args, options);
                               });
    made.add<ResNetOptions>("resnet18", "ResNet-18, with torchvision's parameter names",
                            [](const ResNetOptions& options, const ModelArgs& args) {
                              return resnet18(args, options);
                            });
    made.add<ResNetOptions>("resnet50", "ResNet-50, with torchvision's parameter names",
                            [](const ResNetOptions& options, const ModelArgs& args) {
                              return resnet50(args, options);
                            });
    return made;
  }();
  return registry;
}

}  // namespace syncbn::models
