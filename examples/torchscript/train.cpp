// Trains a network that Python exported as TorchScript on several ranks, with batch normalisation
// over all of them: train_torchscript FILE
//
// init_process_group, convert_sync_batchnorm and DistributedDataParallel make it distributed. The
// network needs no change.
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/optim/sgd.h>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

namespace dist = syncbn::dist;

namespace {

constexpr int64_t kClasses = 4;
constexpr int64_t kBatch = 8;  // per rank

/// The images of each class are brighter in one quarter.
at::Tensor make_images(const at::Tensor& labels) {
  at::Tensor images = at::randn({labels.size(0), 3, 16, 16});
  for (int64_t i = 0; i < labels.size(0); ++i) {
    const auto label = labels[i].item<int64_t>();
    images[i].narrow(1, label / 2 * 8, 8).narrow(2, label % 2 * 8, 8).add_(1);
  }
  return images;
}

torch::jit::Module load(const std::string& file) {
  try {
    return torch::jit::load(file);
  } catch (const c10::Error& error) {
    throw syncbn::base::UserError("cannot load '" + file +
                                  "', which export.py makes: " + error.what_without_backtrace());
  }
}

void train(const std::string& file) {
  dist::init_process_group();
  torch::jit::Module net = load(file);
  if (dist::rank() == 0) syncbn::base::check_can_write(file);
  net.train();
  const auto report = dist::convert_sync_batchnorm(net);
  for (const auto& layer : report.not_converted) {
    std::fprintf(stderr, "%s: %s\n", layer.name.c_str(), layer.reason.c_str());
  }
  dist::DistributedDataParallel<torch::jit::Module> ddp(net);

  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : net.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  at::manual_seed(static_cast<uint64_t>(dist::rank()));
  if (dist::rank() == 0) std::printf("%zu layers converted\n", report.converted.size());
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor labels = at::randint(kClasses, {kBatch}, at::kLong);
    optimizer.zero_grad();
    at::Tensor loss = at::cross_entropy_loss(ddp(make_images(labels)).toTensor(), labels);
    loss.backward();
    optimizer.step();
    loss = loss.detach();
    dist::all_reduce(loss);
    if (dist::rank() == 0 && step % 10 == 0) {
      std::printf("step %d  loss %.3f\n", step, loss.item<double>() / dist::world_size());
    }
  }
  if (dist::rank() != 0) return;
  // Python does not know the operator of converted layers.
  dist::revert_sync_batchnorm(net);
  syncbn::base::write_file_atomically(
      file, [&](const std::filesystem::path& temporary) { net.save(temporary); });
}

}  // namespace

int main(int argc, char** argv) {
  return syncbn::base::run_main("train_torchscript", [&] {
    if (argc != 2) throw syncbn::base::UserError("usage: train_torchscript FILE");
    train(argv[1]);
    return 0;
  });
}
