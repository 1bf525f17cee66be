// gpu_fault_worker FAULT PLACE RANK FOLDER: trains a small network over NCCL. In the first attempt,
// RANK suffers FAULT (throw, kill, memory, stop, none) in PLACE (set-up, new-group; forward,
// backward or checkpoint of the fourth step; first-forward, first-backward). FOLDER/fault and
// FOLDER/restart are written at the time of the fault and of the second attempt.

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

namespace {

namespace dist = syncbn::dist;
namespace fs = std::filesystem;

struct Plan {
  std::string fault;
  std::string place;
  fs::path folder;
  bool is_due = false;

  void reach(const std::string& now) const {
    if (!is_due || now != place) return;
    std::ofstream(folder / "fault") << fault;
    if (fault == "throw") throw std::runtime_error("the failure of this test");
    if (fault == "kill") ::raise(SIGKILL);
    if (fault == "stop") ::raise(SIGSTOP);
    if (fault == "memory") {
      const at::Tensor too_large =
          at::empty({int64_t{1} << 40}, at::TensorOptions(at::kByte).device(dist::device()));
    }
  }
};

/// As in a careful program: the group is destroyed however the function is left.
struct Group {
  ~Group() { dist::destroy_process_group(); }
};

void descend(torch::nn::Module& net) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : net.parameters()) {
    parameter.sub_(parameter.grad(), 0.1);
    parameter.mutable_grad() = at::Tensor();
  }
}

int train(const Plan& plan) {
  dist::init_process_group({.backend = "nccl",
                            .timeout = std::chrono::seconds(3),
                            .connect_timeout = std::chrono::seconds(30)});
  const Group group;
  plan.reach("new-group");
  dist::new_group({0, 1});
  at::manual_seed(dist::rank());
  torch::nn::Sequential net(torch::nn::Linear(4, 8),
                            dist::SyncBatchNorm(dist::SyncBatchNormOptions(8).name("norm")),
                            torch::nn::Linear(8, 1));
  net->to(dist::device());
  dist::DistributedDataParallel<torch::nn::SequentialImpl> ddp(net);
  double loss = 0;
  constexpr int kSteps = 6;
  constexpr int kFaultyStep = 3;
  const auto reach = [&plan](int step, const std::string& place) {
    if (step == 0) plan.reach("first-" + place);
    if (step == kFaultyStep) plan.reach(place);
  };
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor input = at::randn({6, 4}).to(dist::device());
    reach(step, "forward");
    const at::Tensor output = ddp(input);
    output.register_hook(
        [&reach, step](const at::Tensor& /*gradient*/) { reach(step, "backward"); });
    const at::Tensor mean = output.pow(2).mean();
    mean.backward();
    descend(*net);
    loss = mean.item<double>();
    if (step == kFaultyStep) {
      const at::Tensor saved = net->parameters().front().cpu();
      dist::throw_if_aborted();
      plan.reach("checkpoint");
      dist::barrier();
    }
  }
  if (!std::isfinite(loss)) throw std::runtime_error("the loss is not finite");
  fmt::print("rank {} has trained\n", dist::rank());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return syncbn::base::run_main("worker", [&] {
    if (argc != 5) throw std::invalid_argument("gpu_fault_worker FAULT PLACE RANK FOLDER");
    Plan plan{argv[1], argv[2], argv[4]};
    const bool is_first = syncbn::base::env_int("TORCHELASTIC_RESTART_COUNT", 0, 100) == 0;
    plan.is_due = is_first && syncbn::base::env("RANK") == argv[3];
    if (!is_first) std::ofstream(plan.folder / "restart") << ::getpid();
    if (plan.is_due && plan.place == "set-up") {
      std::ofstream(plan.folder / "fault") << plan.fault;
      if (plan.fault == "memory") {
        ::setenv("FAKE_NCCL_CUDA_ERROR", "set-up", 1);
      } else {
        ::setenv("FAKE_NCCL_SIGNAL_AT_SET_UP",
                 std::to_string(plan.fault == "kill" ? SIGKILL : SIGSTOP).c_str(), 1);
      }
    }
    return train(plan);
  });
}
