// Trains with our DDP the cases that ddp_parity.py trains with Python's; ddp_parity.py explains the
// arguments.
#include <fmt/format.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/comm_hooks.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/train/optimizer.h>

#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
namespace train = syncbn::train;

constexpr int64_t kSteps = 20;

using Case = std::map<std::string, std::string>;

Case parse(const std::string& words) {
  Case made;
  std::istringstream in(words);
  for (std::string word; in >> word;) {
    const size_t equals = word.find('=');
    made[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return made;
}

/// `route` selects the parameters to use, if a network has a choice.
struct Net : nn::Module {
  virtual std::vector<at::Tensor> forward(const at::Tensor& x, int64_t route) = 0;
  virtual int64_t inputs() const { return 20; }
};

struct Mlp : Net {
  std::vector<at::Tensor> forward(const at::Tensor& x, int64_t) override {
    return {third(at::relu(second(at::relu(first(x)))))};
  }
  nn::Linear first = register_module("first", nn::Linear(20, 64));
  nn::Linear second = register_module("second", nn::Linear(64, 33));
  nn::Linear third = register_module("third", nn::Linear(33, 7));
};

struct Conv : Net {
  std::vector<at::Tensor> forward(const at::Tensor& images, int64_t) override {
    at::Tensor x = at::relu(first_norm(first(images.view({-1, 3, 8, 8}))));
    x = at::relu(second_norm(second(x)));
    return {last(x.mean({2, 3}))};
  }
  int64_t inputs() const override { return 3 * 8 * 8; }
  nn::Conv2d first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
  nn::BatchNorm2d first_norm = register_module("first_norm", nn::BatchNorm2d(8));
  nn::Conv2d second = register_module("second", nn::Conv2d(nn::Conv2dOptions(8, 12, 3).stride(2)));
  nn::BatchNorm2d second_norm = register_module("second_norm", nn::BatchNorm2d(12));
  nn::Linear last = register_module("last", nn::Linear(12, 5));
};

struct Heads : Net {
  std::vector<at::Tensor> forward(const at::Tensor& input, int64_t) override {
    const at::Tensor x = at::relu(trunk(input));
    return {left(x), right(x)};
  }
  nn::Linear trunk = register_module("trunk", nn::Linear(20, 40));
  nn::Linear left = register_module("left", nn::Linear(40, 3));
  nn::Linear right = register_module("right", nn::Linear(40, 6));
};

struct Branches : Net {
  std::vector<at::Tensor> forward(const at::Tensor& input, int64_t route) override {
    at::Tensor x = at::relu(trunk(input));
    if (route % 4 < 2) {
      x = left(x);
    } else if (route % 4 == 2) {
      x = right(x);
    }
    return {last(x)};
  }
  nn::Linear trunk = register_module("trunk", nn::Linear(20, 40));
  nn::Linear left = register_module("left", nn::Linear(40, 40));
  nn::Linear right = register_module("right", nn::Linear(40, 40));
  nn::Linear last = register_module("last", nn::Linear(40, 4));
};

std::shared_ptr<Net> make_net(const std::string& name) {
  if (name == "mlp") return std::make_shared<Mlp>();
  if (name == "conv") return std::make_shared<Conv>();
  if (name == "heads") return std::make_shared<Heads>();
  if (name == "branches") return std::make_shared<Branches>();
  throw std::invalid_argument("no net " + name);
}

std::unique_ptr<train::Optimizer> make_optimizer(const std::string& name, bool fused,
                                                 const nn::Module& net) {
  const std::string yaml =
      fmt::format("{{{}, fused: {}}}",
                  name == "sgd" ? "type: sgd, lr: 0.05, momentum: 0.9, weight_decay: 1e-3"
                                : "type: adamw, lr: 1e-3, weight_decay: 1e-2",
                  fused);
  namespace config = syncbn::config;
  config::Component<train::OptimizerKind> component;
  config::Faults faults;
  config::Codec<config::Component<train::OptimizerKind>>::read(config::parse_yaml(yaml, "test"),
                                                               component, "optimizer", faults);
  faults.throw_if_any();
  train::NamedTensors parameters;
  for (const auto& item : net.named_parameters()) parameters.emplace_back(item.key(), item.value());
  return component.make(parameters);
}

dist::DdpOptions options_of(const Case& given) {
  dist::DdpOptions options;
  const std::map<std::string, bool*> flags{
      {"broadcast_buffers", &options.broadcast_buffers},
      {"find_unused_parameters", &options.find_unused_parameters},
      {"gradient_as_bucket_view", &options.gradient_as_bucket_view},
      {"static_graph", &options.static_graph},
      {"skip_all_reduce_unused_params", &options.skip_all_reduce_unused_params},
  };
  const std::set<std::string> others{"net",  "optimizer", "fused", "backwards",
                                     "loss", "hook",      "route"};
  for (const auto& [key, value] : given) {
    if (key == "bucket_cap_mb") {
      options.bucket_cap_mb = std::stod(value);
    } else if (const auto flag = flags.find(key); flag != flags.end()) {
      *flag->second = value == "1";
    } else if (!others.contains(key)) {
      throw std::invalid_argument("a case with " + key);
    }
  }
  return options;
}

void register_hook(const std::string& name, dist::DistributedDataParallel<Net>& ddp) {
  const std::map<std::string, std::function<dist::CommHook()>> hooks{
      {"allreduce", [] { return dist::allreduce_hook(); }},
      {"fp16", [] { return dist::fp16_compress_hook(); }},
      {"bf16", [] { return dist::bf16_compress_hook(); }},
      {"powersgd",
       [] {
         return dist::power_sgd_hook(
             {.matrix_approximation_rank = 2, .start_power_sgd_iter = 5, .random_seed = 3});
       }},
  };
  if (!name.empty()) ddp.register_comm_hook(hooks.at(name)(), name);
}

at::Tensor loss_of(const std::vector<at::Tensor>& outputs, bool only_first) {
  at::Tensor total;
  for (const at::Tensor& output : outputs) {
    if (only_first && total.defined()) break;
    const at::Tensor loss = at::mse_loss(output, at::randn(output.sizes()));
    total = total.defined() ? total + loss : loss;
  }
  return total;
}

void write_state(std::ofstream& file, const nn::Module& net) {
  const auto write = [&file](const at::Tensor& tensor) {
    const at::Tensor bytes = tensor.detach().contiguous();
    file.write(static_cast<const char*>(bytes.const_data_ptr()),
               static_cast<std::streamsize>(bytes.nbytes()));
  };
  for (const at::Tensor& parameter : net.parameters()) write(parameter);
  for (const at::Tensor& buffer : net.buffers()) write(buffer);
}

void train_case(const Case& given, std::ofstream& file) {
  const auto value_of = [&given](const std::string& key, const std::string& missing) {
    const auto found = given.find(key);
    return found == given.end() ? missing : found->second;
  };
  const int64_t rank = dist::rank();
  at::manual_seed(static_cast<uint64_t>(7 + rank));
  const auto net = make_net(value_of("net", ""));
  dist::DistributedDataParallel<Net> ddp(net, options_of(given));
  register_hook(value_of("hook", ""), ddp);
  const auto optimizer =
      make_optimizer(value_of("optimizer", ""), value_of("fused", "") == "1", *net);
  const int64_t backwards = std::stoll(value_of("backwards", "1"));
  const bool fixed_route = value_of("route", "") == "fixed";
  const bool only_first = value_of("loss", "") == "first";

  write_state(file, *net);
  for (int64_t step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    for (int64_t backward = 0; backward < backwards; ++backward) {
      at::manual_seed(static_cast<uint64_t>(1000 + 100 * step + 10 * backward + rank));
      const auto accumulate = [&] {
        const at::Tensor x = at::randn({4 + rank, net->inputs()});
        loss_of(ddp(x, fixed_route ? 0 : step + rank), only_first).backward();
      };
      if (backward + 1 < backwards) {
        const auto guard = ddp.no_sync();
        accumulate();
      } else {
        accumulate();
      }
    }
    optimizer->step(optimizer->base_lr());
    write_state(file, *net);
  }
}

}  // namespace

int main(int argc, char** argv) {
  // In shared memory, more than two ranks add in another order than Python's.
  dist::init_process_group({.backend = "gloo", .shared_memory = false});
  for (int i = 2; i < argc; ++i) {
    std::ofstream file(fmt::format("{}/{}.rank{}", argv[1], i - 2, dist::rank()), std::ios::binary);
    train_case(parse(argv[i]), file);
  }
  dist::destroy_process_group();
}
