// DistributedDataParallel around TorchScript modules.

#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/jit/api/module.h>

#include "dist/group.h"
#include "dist/tensors.h"

namespace {

namespace dist = syncbn::dist;
using dist::DistributedDataParallel;
using syncbn::test::close;
using syncbn::test::run_group;
using ScriptDdp = DistributedDataParallel<torch::jit::Module>;

/// weight * input, and the members of a container.
torch::jit::Module make_module() {
  torch::jit::Module module("Scale");
  module.register_parameter("weight", at::ones({2}).requires_grad_(), /*is_buffer=*/false);
  module.register_parameter("unused", at::ones({2}).requires_grad_(), /*is_buffer=*/false);
  module.register_buffer("offset", at::full({2}, 0.0));
  module.register_attribute("training", c10::BoolType::get(), true);
  module.define(R"(
    def forward(self, input: Tensor) -> Dict[str, Tuple[Tensor, List[Tensor]]]:
      output = self.weight * input + self.offset
      return {"scores": (output, [output * 2])}
  )");
  return module;
}

TEST(DdpScriptTest, AveragesGradientsAndFindsTensorsInTheOutput) {
  run_group(2, [](int rank) {
    torch::jit::Module module = make_module();
    {
      const at::NoGradGuard no_grad;
      module.attr("offset").toTensor().fill_(rank);
    }
    ScriptDdp ddp(module, {.find_unused_parameters = true});
    EXPECT_TRUE(module.attr("offset").toTensor().equal(at::full({2}, 0.0))) << "rank 0's";
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      const c10::IValue output = ddp(at::full({2}, rank * 2.0));
      const c10::IValue pair = output.toGenericDict().at("scores");
      pair.toTupleRef().elements()[1].toTensorVector()[0].sum().backward();
      EXPECT_TRUE(close(module.attr("weight").toTensor().grad(), at::full({2}, 2.0)));
      EXPECT_FALSE(module.attr("unused").toTensor().grad().defined());
    }
    ddp.eval();
    EXPECT_FALSE(module.is_training());
    EXPECT_FALSE(ddp.module().is_training());
  });
}

TEST(DdpScriptTest, TakesPartInNoSyncAndJoin) {
  run_group(2, [](int rank) {
    torch::jit::Module module("Scale");
    module.register_parameter("weight", at::ones({2}).requires_grad_(), /*is_buffer=*/false);
    module.define("def forward(self, input: Tensor) -> Tensor:\n  return self.weight * input\n");
    ScriptDdp ddp(module);
    const auto gradient = [&] { return module.attr("weight").toTensor().grad(); };
    {
      const auto guard = ddp.no_sync();
      ddp(at::full({2}, rank + 1.0)).toTensor().sum().backward();
    }
    EXPECT_TRUE(close(gradient(), at::full({2}, rank + 1.0)));
    const auto guard = ddp.join();
    for (int step = 0; step <= rank; ++step) {
      ddp.zero_grad();
      ddp(at::full({2}, 4.0)).toTensor().sum().backward();
      EXPECT_TRUE(close(gradient(), at::full({2}, step == 0 ? 4.0 : 2.0)));
    }
  });
}

}  // namespace
