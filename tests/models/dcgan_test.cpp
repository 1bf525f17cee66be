#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <syncbn/config/schema.h>
#include <syncbn/models/gan.h>
#include <syncbn/models/weights.h>

#include <string>

#include "support/from_yaml.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::models {
namespace {

constexpr const char* kPython = R"(
import sys
import torch
sys.path.insert(0, sys.argv[1])
from other_networks import Dcgan
torch.manual_seed(5)
net = Dcgan()
state = {name: value.clone() for name, value in net.state_dict().items()}
noise = torch.randn(3, 100)
net(noise)  # gives the running statistics values
images, logits = net.eval()(noise)
torch.save({"state": state, "trained": net.state_dict(),
            "outputs": {"noise": noise, "images": images, "logits": logits}}, sys.argv[2])
)";

TEST(DcganTest, IsPyTorchsExample) {
  SYNCBN_SKIP_UNLESS(test::python_has("torchvision"), "torchvision");
  const test::TempFolder folder;
  const std::string file = folder / "python.pt";
  const auto python =
      test::run_program({test::python(), "-c", kPython, SYNCBN_SOURCE_DIR "/tests/models", file});
  ASSERT_EQ(python.exit_code, 0) << python.err;

  ModelArgs args;
  args.sample_shape = {3, 64, 64};
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    args.norm = norm;
    at::manual_seed(5);
    const auto model = test::from_yaml<ModelKind>("dcgan", "model").make(args);
    const StateDict first = read_state_dict(file, "state");
    const StateDict own = state_dict(*model);
    EXPECT_EQ(own.keys(), first.keys());
    for (const auto& item : own) EXPECT_TRUE(at::equal(item.value(), first[item.key()]));

    load_state_dict(*model, read_state_dict(file, "trained"));
    auto& gan = dynamic_cast<Gan&>(*model);
    gan.eval();
    const StateDict outputs = read_state_dict(file, "outputs");
    const at::Tensor images = gan.generate(outputs["noise"]);
    EXPECT_TRUE(at::allclose(images, outputs["images"], 0, 1e-5));
    EXPECT_TRUE(at::allclose(gan.discriminate(images), outputs["logits"], 1e-5, 1e-5));
  }
}

}  // namespace
}  // namespace syncbn::models
