// Trains a small network on two interleaved half circles, split over the ranks.
//
// init_process_group, convert_sync_batchnorm, DistributedDataParallel and DistributedSampler make
// it distributed; the rest is an ordinary libtorch program. With a file name as its argument, it
// saves a checkpoint after each epoch and resumes from it when started again; on Ctrl-C or SIGTERM
// it then ends after the epoch with exit code 85.
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

#include <ATen/Functions.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <syncbn/train/checkpoint.h>

namespace dist = syncbn::dist;

namespace {

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }

  torch::nn::Sequential layers = register_module(
      "layers", torch::nn::Sequential(torch::nn::Linear(2, 32), torch::nn::BatchNorm1d(32),
                                      torch::nn::ReLU(), torch::nn::Linear(32, 2)));
};
TORCH_MODULE(Net);

struct Moons {
  at::Tensor points;  // [N, 2]
  at::Tensor labels;  // [N]
};

Moons make_moons(int64_t count) {
  const auto angle = at::rand({count}) * M_PI;
  const auto labels = at::randint(0, 2, {count}, at::kLong);
  const auto side = 1 - 2 * labels;
  const auto points =
      at::stack({side * angle.cos() + labels, side * angle.sin() + labels * 0.5}, 1);
  return {points + 0.1 * at::randn({count, 2}), labels};
}

volatile std::sig_atomic_t stop_signal = 0;

/// Whether any rank received a signal. All ranks call this at the same place, so that all stop
/// there.
bool any_rank_stops() {
  auto stop = at::tensor(static_cast<int64_t>(stop_signal));
  dist::all_reduce(stop, c10d::ReduceOp::MAX);
  return stop.item<int64_t>() != 0;
}

int run(const std::string& file) {
  if (!file.empty()) {
    for (const int signal : {SIGINT, SIGTERM}) {
      std::signal(signal, [](int received) { stop_signal = received; });
    }
  }
  dist::init_process_group();
  const int rank = dist::rank();
  const int world_size = dist::world_size();
  torch::manual_seed(0);
  const auto moons = make_moons(512);

  Net net;
  dist::convert_sync_batchnorm(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  int64_t first_epoch = 0;
  if (!file.empty() && std::filesystem::exists(file)) {
    first_epoch = syncbn::train::load_checkpoint(file, *net, &optimizer).at("epoch").toInt();
  }
  dist::DistributedDataParallel<NetImpl> ddp(net);
  syncbn::data::DistributedSampler sampler(512);

  for (int64_t epoch = first_epoch; epoch < 20; ++epoch) {
    sampler.set_epoch(epoch);
    for (const auto& batch : at::tensor(sampler.indices()).split(32)) {
      const auto loss = torch::nn::functional::cross_entropy(
          ddp(moons.points.index_select(0, batch)), moons.labels.index_select(0, batch));
      ddp.zero_grad();
      loss.backward();
      optimizer.step();
    }
    if (file.empty()) continue;
    if (rank == 0) {
      syncbn::train::save_checkpoint(file, *net, &optimizer, {{"epoch", epoch + 1}});
    }
    if (any_rank_stops()) {
      dist::destroy_process_group();
      return syncbn::base::kExitPreempted;
    }
  }

  ddp.eval();
  const auto correct = ddp(moons.points).argmax(1).eq(moons.labels).sum().item<int64_t>();
  std::printf("rank %d of %d: %ld of 512 points right\n", rank, world_size, correct);
  dist::destroy_process_group();
  return correct > 480 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Turns an error into one message and its exit code.
  return syncbn::base::run_main("two_moons", [&] { return run(argc > 1 ? argv[1] : ""); });
}
