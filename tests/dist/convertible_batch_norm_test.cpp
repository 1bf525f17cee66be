// dist::BatchNorm1d, 2d and 3d, and libtorch's layers, before and after conversion.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/batch_norm.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <sstream>
#include <string>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/serialize.h>

#include "batch_norm/convert.h"
#include "dist/convert_cases.h"
#include "dist/device.h"
#include "dist/tensors.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using syncbn::base::UserError;
using syncbn::test::average_gradients;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::on_device;
using syncbn::test::randn;
using syncbn::test::run_on_device;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ConvertibleBatchNormTest = syncbn::test::DeviceTest;

constexpr int64_t kChannels = 3;
constexpr const char* kRefusal = "Expected more than 1 value per channel";

std::string printed(const nn::Module& module) {
  std::ostringstream text;
  text << module;
  return text.str();
}

std::vector<nn::BatchNormOptions> all_options() {
  return {nn::BatchNormOptions(kChannels), nn::BatchNormOptions(kChannels).eps(1e-3).momentum(0.3),
          nn::BatchNormOptions(kChannels).momentum(std::nullopt),
          nn::BatchNormOptions(kChannels).affine(false),
          nn::BatchNormOptions(kChannels).track_running_stats(false)};
}

void expect_same_tensors(const nn::Module& actual, const nn::Module& expected) {
  const auto compare = [](const auto& own, const auto& other) {
    ASSERT_EQ(own.keys(), other.keys());
    for (const auto& item : own) EXPECT_TRUE(item.value().equal(other[item.key()])) << item.key();
  };
  compare(actual.named_parameters(), expected.named_parameters());
  compare(actual.named_buffers(), expected.named_buffers());
}

/// @param sizes of the input
template <class DropIn, class Layer>
void expect_same_as_libtorchs(const std::vector<int64_t>& sizes,
                              const std::vector<int64_t>& wrong_sizes) {
  for (const nn::BatchNormOptions& options : all_options()) {
    auto own = on_device(DropIn(options));
    auto reference = on_device(Layer(options));
    EXPECT_EQ(printed(*own), printed(*reference));
    EXPECT_NE(own->template as<Layer>(), nullptr);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = randn(sizes).requires_grad_();
      const at::Tensor y = x.detach().clone().requires_grad_();
      const at::Tensor output = own(x);
      const at::Tensor expected = reference(y);
      EXPECT_TRUE(output.equal(expected));
      output.pow(3).sum().backward();
      expected.pow(3).sum().backward();
      EXPECT_TRUE(x.grad().equal(y.grad()));
    }
    expect_same_tensors(*own, *reference);
    std::vector<int64_t> one_value(sizes.size(), 1);
    one_value[1] = kChannels;
    for (const auto& refused : {wrong_sizes, one_value}) {
      const at::Tensor x = randn(refused);
      EXPECT_EQ(message_of<c10::Error>([&] { own(x); }).substr(0, 60),
                message_of<c10::Error>([&] { reference(x); }).substr(0, 60));
    }
    own->eval();
    reference->eval();
    const at::Tensor x = randn(sizes);
    EXPECT_TRUE(own(x).equal(reference(x)));
  }
}

TEST_F(ConvertibleBatchNormTest, DropInsAreLibtorchsLayersUntilConverted) {
  run_ranks(1, [](int) {
    expect_same_as_libtorchs<dist::BatchNorm1d, nn::BatchNorm1d>({5, kChannels, 4},
                                                                 {5, kChannels, 4, 4});
    expect_same_as_libtorchs<dist::BatchNorm2d, nn::BatchNorm2d>({5, kChannels, 4, 4},
                                                                 {5, kChannels, 4});
    expect_same_as_libtorchs<dist::BatchNorm3d, nn::BatchNorm3d>({5, kChannels, 4, 2, 2},
                                                                 {5, kChannels, 4, 4});
  });
}

TEST_F(ConvertibleBatchNormTest, StateIsExchangedWithLibtorchsLayer) {
  run_ranks(1, [](int) {
    auto from = on_device(nn::BatchNorm2d(kChannels));
    from(randn({4, kChannels, 2, 2}));
    std::stringstream file;
    torch::save(from, file);
    dist::BatchNorm2d to(kChannels);
    torch::load(to, file);
    expect_same_tensors(*to, *from);

    std::stringstream back;
    torch::save(to, back);
    nn::BatchNorm2d other(kChannels);
    torch::load(other, back);
    expect_same_tensors(*other, *from);
  });
}

TEST_F(ConvertibleBatchNormTest, ACloneIsADropInWithTensorsOfItsOwn) {
  run_ranks(1, [](int) {
    nn::Sequential net(dist::BatchNorm2d(nn::BatchNormOptions(kChannels).eps(1e-2)));
    net->forward(randn({4, kChannels, 2, 2}, at::kFloat).cpu());
    net->eval();
    const auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
    auto& layer = clone->at<dist::BatchNorm2dImpl>(0);
    expect_same_tensors(*clone, *net);
    EXPECT_FALSE(layer.is_training());
    EXPECT_EQ(layer.options.eps(), 1e-2);
    EXPECT_EQ(layer.named_parameters()["weight"].unsafeGetTensorImpl(),
              layer.weight.unsafeGetTensorImpl());
    layer.running_mean.fill_(7);
    EXPECT_FALSE(net->buffers()[0].equal(clone->buffers()[0]));
  });
}

/// Layers of one class in a net that has one value per channel on each rank.
template <class Norm>
struct PooledNetImpl : nn::Module {
  explicit PooledNetImpl(const nn::BatchNormOptions& options) {
    first = this->register_module("first", Norm(options));
    linear = this->register_module("linear", nn::Linear(kChannels, kChannels));
    second = this->register_module("second", Norm(options));
  }
  at::Tensor forward(const at::Tensor& x) { return second(linear(first(x))); }
  Norm first{nullptr};
  nn::Linear linear{nullptr};
  Norm second{nullptr};
};

/// Trains on this rank's rows of each batch, and the reference on the whole batch, and compares
/// them.
/// @param begin, rows this rank's rows of the batch
template <class Forward, class Reference>
void expect_rows_train_as_whole_batch(const Forward& forward, nn::Module& net, Reference& reference,
                                      int64_t begin, int64_t rows, int64_t all_rows) {
  for (int step = 0; step < 3; ++step) {
    const at::Tensor batch = randn({all_rows, kChannels}, at::kDouble);
    const at::Tensor target = randn({all_rows, kChannels}, at::kDouble);
    const auto loss = [](const at::Tensor& scores, const at::Tensor& wanted) {
      return (scores - wanted).pow(2).mean();
    };
    // Means over this rank's rows, weighted by its share of the batch.
    const double scale = static_cast<double>(dist::world_size() * rows) / all_rows;
    (loss(forward(batch.narrow(0, begin, rows)), target.narrow(0, begin, rows)) * scale).backward();
    loss(reference.forward(batch), target).backward();
    average_gradients(net.parameters());
    const auto expected = reference.parameters();
    const auto actual = net.parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(actual[i].grad(), expected[i].grad(), 1e-9, 1e-9)) << i;
    }
    syncbn::test::sgd_step(actual);
    syncbn::test::sgd_step(expected);
    for (size_t i = 0; i < net.buffers().size(); ++i) {
      EXPECT_TRUE(close(net.buffers()[i], reference.buffers()[i], 1e-9, 1e-9)) << i;
    }
  }
}

TEST_F(ConvertibleBatchNormTest, ConvertedDropInsTakeOneValuePerChannelOnARank) {
  run_on_device(2, [](int rank) {
    for (const nn::BatchNormOptions& options : all_options()) {
      at::manual_seed(1);
      PooledNetImpl<dist::BatchNorm1d> net(options);
      at::manual_seed(1);
      PooledNetImpl<nn::BatchNorm1d> reference(options);
      net.to(syncbn::test::device(), at::kDouble);
      reference.to(syncbn::test::device(), at::kDouble);
      const auto report = dist::convert_sync_batchnorm(net);
      EXPECT_THAT(report.converted, ElementsAre("first", "second"));
      EXPECT_THAT(report.refuse_one_value, IsEmpty());
      const auto forward = [&](const at::Tensor& x) { return net.forward(x); };
      expect_rows_train_as_whole_batch(forward, net, reference, rank, 1, 2);
      // One value on rank 0, several on rank 1, where libtorch's forward() accepts them.
      expect_rows_train_as_whole_batch(forward, net, reference, rank, 1 + 3 * rank, 5);
    }
  });
}

// As in the head of DeepLab.
TEST_F(ConvertibleBatchNormTest, ImagePoolingTrainsAtOneImageOnARank) {
  run_on_device(2, [](int rank) {
    const auto make = [] {
      at::manual_seed(1);
      return on_device(nn::Sequential(nn::AdaptiveAvgPool2d(1),
                                      nn::Conv2d(nn::Conv2dOptions(4, kChannels, 1).bias(false)),
                                      nn::BatchNorm2d(kChannels), nn::ReLU()));
    };
    auto net = make();
    auto reference = make();
    dist::convert_sync_batchnorm(*net);
    const at::Tensor images = randn({2, 4, 5, 5});
    const at::Tensor pooled = net->forward(images.narrow(0, rank, 1));
    const at::Tensor expected = reference->forward(images);
    EXPECT_TRUE(close(pooled, expected.narrow(0, rank, 1), 1e-4, 1e-5));
  });
}

TEST_F(ConvertibleBatchNormTest, OneValueOverAllRanksIsRefused) {
  run_on_device(2, [](int rank) {
    auto layer = on_device(dist::BatchNorm2d(kChannels));
    dist::convert_sync_batchnorm(*layer);
    EXPECT_THAT(message_of<UserError>([&] {
                  layer(randn({1 - rank, kChannels, 1, 1}));
                }),
                HasSubstr("one value per channel"));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1) << "as libtorch's layer counts";
    layer->eval();
    EXPECT_TRUE(layer(randn({1, kChannels, 1, 1})).defined());
  });
  run_ranks(1, [](int) {
    auto layer = on_device(dist::BatchNorm2d(kChannels));
    dist::convert_sync_batchnorm(*layer);
    EXPECT_THAT(message_of<c10::Error>([&] {
                  layer(randn({1, kChannels, 1, 1}));
                }),
                HasSubstr(kRefusal));
  });
}

/// libtorch's layers, in a Sequential in a ModuleList.
struct ContainedNetImpl : nn::Module {
  ContainedNetImpl() {
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(nn::Sequential(nn::BatchNorm1d(kChannels), nn::Linear(kChannels, kChannels),
                                       nn::BatchNorm1d(kChannels)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<nn::SequentialImpl>()->forward(x);
    return x;
  }
  nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(ContainedNet);

std::vector<const void*> addresses_of(const nn::Module& module) {
  std::vector<const void*> all;
  for (const auto& one : module.parameters()) all.push_back(one.unsafeGetTensorImpl());
  for (const auto& one : module.buffers()) all.push_back(one.unsafeGetTensorImpl());
  return all;
}

TEST_F(ConvertibleBatchNormTest, LibtorchsLayersInContainersTrainBelowDdp) {
  run_on_device(2, [](int rank) {
    at::manual_seed(1);
    ContainedNet net;
    at::manual_seed(1);
    ContainedNet reference;
    net->to(syncbn::test::device(), at::kDouble);
    reference->to(syncbn::test::device(), at::kDouble);
    const auto tensors = addresses_of(*net);
    const auto names = net->named_parameters().keys();
    const auto modules = net->named_modules().keys();
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_THAT(report.converted,
                ElementsAre("blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"));
    EXPECT_THAT(report.refuse_one_value, IsEmpty());
    EXPECT_EQ(addresses_of(*net), tensors);
    EXPECT_EQ(net->named_parameters().keys(), names);
    EXPECT_EQ(net->named_modules().keys(), modules);
    EXPECT_THAT(printed(*net), AllOf(HasSubstr("syncbn::dist::SyncBatchNorm(3, eps=1e-05"),
                                     Not(HasSubstr("torch::nn::BatchNorm"))));
    dist::DistributedDataParallel<ContainedNetImpl> ddp(net);
    expect_rows_train_as_whole_batch([&](const at::Tensor& x) { return ddp(x); }, *net, *reference,
                                     rank, 1, 2);
    net->eval();
    reference->eval();
    const at::Tensor x = randn({1, kChannels}, at::kDouble);
    EXPECT_TRUE(close(net->forward(x), reference->forward(x), 1e-9, 1e-9));
  });
}

TEST_F(ConvertibleBatchNormTest, RevertedLayersAreLibtorchsAgain) {
  run_on_device(2, [](int) {
    auto net = on_device(ContainedNet());
    const auto tensors = addresses_of(*net);
    const auto text = printed(*net);
    for (int round = 0; round < 2; ++round) {
      dist::convert_sync_batchnorm(*net);
      dist::convert_sync_batchnorm(*net);  // a second conversion changes nothing
      EXPECT_EQ(net->named_modules()["blocks.0.0"]->name(), "torch::nn::BatchNorm1dImpl");
      EXPECT_TRUE(net->forward(randn({1, kChannels})).defined());
      dist::revert_sync_batchnorm(*net);
      EXPECT_EQ(addresses_of(*net), tensors);
      EXPECT_EQ(printed(*net), text);
      EXPECT_THAT(message_of<c10::Error>([&] {
                    net->forward(randn({1, kChannels}));
                  }),
                  HasSubstr(kRefusal));
    }
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
  });
}

TEST_F(ConvertibleBatchNormTest, ACloneOfAConvertedModuleIsConvertedAndRevertedAlone) {
  run_ranks(1, [](int) {
    auto net = nn::Sequential(nn::BatchNorm1d(kChannels), dist::BatchNorm1d(kChannels));
    dist::convert_sync_batchnorm(*net);
    const auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
    EXPECT_THAT(printed(*clone), Not(HasSubstr("SyncBatchNorm"))) << "it is not converted";
    dist::convert_sync_batchnorm(*clone);
    EXPECT_THAT(printed(*clone), HasSubstr("SyncBatchNorm"));
    dist::revert_sync_batchnorm(*clone);
    EXPECT_THAT(printed(*clone), Not(HasSubstr("SyncBatchNorm")));
    EXPECT_THAT(printed(*net), HasSubstr("SyncBatchNorm"));
    expect_same_tensors(*clone, *net);
  });
}

/// A user's class, whose own forward() Sequential calls.
struct DoubledImpl : nn::BatchNorm1dImpl {
  using nn::BatchNorm1dImpl::BatchNorm1dImpl;
  at::Tensor forward(const at::Tensor& x) { return nn::BatchNorm1dImpl::forward(x) * 2; }
};
TORCH_MODULE(Doubled);

/// One of libtorch's layers in each place where a module can have it.
struct PlacesNetImpl : nn::Module {
  explicit PlacesNetImpl(const nn::BatchNormOptions& options) {
    member = register_module("member", nn::BatchNorm1d(options));
    held = nn::BatchNorm1d(options);
    chain = register_module("chain", nn::Sequential(held, nn::BatchNorm1d(options)));
    list = register_module("list", nn::ModuleList(nn::BatchNorm1d(options)));
    dict = register_module("dict", nn::ModuleDict());
    dict->update({{"a", nn::BatchNorm1d(options).ptr()}});
    pointer = register_module("pointer", std::make_shared<nn::BatchNorm1dImpl>(options));
    many = {register_module("many", nn::BatchNorm1d(options))};
    linear = register_module("linear", nn::Linear(kChannels, kChannels));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = linear(chain->forward(member(x)));
    y = list->at<nn::BatchNorm1dImpl>(0).forward(y) + y.relu();
    y = dict->at<nn::BatchNorm1dImpl>("a").forward(y) + y.relu();
    return many.front()(pointer->forward(y) + y.relu());
  }
  nn::BatchNorm1d member{nullptr}, held{nullptr};
  nn::Sequential chain{nullptr};
  nn::ModuleList list{nullptr};
  nn::ModuleDict dict{nullptr};
  std::shared_ptr<nn::BatchNorm1dImpl> pointer;
  std::vector<nn::BatchNorm1d> many;
  nn::Linear linear{nullptr};
};
TORCH_MODULE(PlacesNet);

TEST_F(ConvertibleBatchNormTest, LibtorchsLayersTakeOneValuePerChannelWhereverTheyAre) {
  run_on_device(2, [](int rank) {
    for (const nn::BatchNormOptions& options : all_options()) {
      at::manual_seed(1);
      PlacesNet net(options);
      at::manual_seed(1);
      PlacesNet reference(options);
      net->to(syncbn::test::device(), at::kDouble);
      reference->to(syncbn::test::device(), at::kDouble);
      const auto report = dist::convert_sync_batchnorm(*net);
      EXPECT_THAT(report.converted, ElementsAre("member", "chain.0", "chain.1", "list.0", "dict.a",
                                                "pointer", "many"));
      EXPECT_THAT(report.refuse_one_value, IsEmpty());
      EXPECT_THAT(printed(*net), AllOf(HasSubstr("syncbn::dist::SyncBatchNorm(3, eps="),
                                       Not(HasSubstr("torch::nn::BatchNorm"))));
      const auto forward = [&](const at::Tensor& x) { return net->forward(x); };
      expect_rows_train_as_whole_batch(forward, *net, *reference, rank, 1, 2);
      // One value on rank 0, several on rank 1.
      expect_rows_train_as_whole_batch(forward, *net, *reference, rank, 1 + 3 * rank, 5);
      EXPECT_EQ(net->member->options.track_running_stats(), options.track_running_stats());
      EXPECT_TRUE(net->member->is_training());
      net->eval();
      reference->eval();
      EXPECT_FALSE(net->member->is_training());
      const at::Tensor x = randn({options.track_running_stats() ? 1 : 2, kChannels}, at::kDouble);
      EXPECT_TRUE(close(net->forward(x), reference->forward(x), 1e-9, 1e-9));
    }
  });
}

// In pooled images, and in volumes.
TEST_F(ConvertibleBatchNormTest, LibtorchsLayersOfAllDimensionsTakeOneValuePerChannel) {
  run_on_device(2, [](int rank) {
    const auto expect = [rank](auto layer, auto reference, std::vector<int64_t> sizes) {
      layer->to(syncbn::test::device());
      reference->to(syncbn::test::device());
      dist::convert_sync_batchnorm(*layer);
      at::manual_seed(1);
      const at::Tensor batch = randn(sizes);
      EXPECT_TRUE(
          close(layer(batch.narrow(0, rank, 1)), reference(batch).narrow(0, rank, 1), 1e-4, 1e-5));
      EXPECT_TRUE(close(layer->running_var, reference->running_var, 1e-4, 1e-5));
      EXPECT_EQ(layer->num_batches_tracked.template item<int64_t>(), 1);
    };
    expect(nn::BatchNorm1d(kChannels), nn::BatchNorm1d(kChannels), {2, kChannels, 1});
    expect(nn::BatchNorm2d(kChannels), nn::BatchNorm2d(kChannels), {2, kChannels, 1, 1});
    expect(nn::BatchNorm3d(kChannels), nn::BatchNorm3d(kChannels), {2, kChannels, 1, 1, 1});
  });
}

TEST_F(ConvertibleBatchNormTest, TheReportNamesLayersThatStillRefuseOneValuePerChannel) {
  run_on_device(2, [](int rank) {
    auto net = on_device(nn::Sequential(Doubled(kChannels), nn::BatchNorm1d(kChannels)));
    auto reference = on_device(nn::Sequential(Doubled(kChannels), nn::BatchNorm1d(kChannels)));
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_THAT(report.converted, ElementsAre("0", "1"));
    ASSERT_EQ(report.refuse_one_value.size(), 1u);
    EXPECT_EQ(report.refuse_one_value[0].name, "0");
    EXPECT_EQ(report.refuse_one_value[0].reason,
              "its class is derived from libtorch's; derive it from dist::BatchNorm1dImpl, 2d or "
              "3d");
    at::manual_seed(1);
    const at::Tensor batch = randn({6, kChannels});
    const at::Tensor whole = reference->forward(batch);
    EXPECT_TRUE(close(net->forward(batch.narrow(0, 3 * rank, 3)), whole.narrow(0, 3 * rank, 3),
                      1e-4, 1e-5));
    EXPECT_THAT(message_of<c10::Error>([&] {
                  net->forward(randn({1, kChannels}));
                }),
                HasSubstr(kRefusal));
  });
}

// A user's class that is derived from the drop-in.
struct TripledImpl : dist::BatchNorm1dImpl {
  using dist::BatchNorm1dImpl::BatchNorm1dImpl;
  at::Tensor forward(const at::Tensor& x) { return dist::BatchNorm1dImpl::forward(x) * 3; }
};
TORCH_MODULE(Tripled);

TEST_F(ConvertibleBatchNormTest, AClassDerivedFromADropInTakesOneValuePerChannel) {
  run_on_device(2, [](int rank) {
    auto net = on_device(Tripled(kChannels));
    auto reference = on_device(Tripled(kChannels));
    EXPECT_THAT(dist::convert_sync_batchnorm(*net).refuse_one_value, IsEmpty());
    at::manual_seed(1);
    const at::Tensor batch = randn({2, kChannels});
    EXPECT_TRUE(
        close(net(batch.narrow(0, rank, 1)), reference(batch).narrow(0, rank, 1), 1e-4, 1e-5));
  });
}

TEST_F(ConvertibleBatchNormTest, ALayerInSeveralContainersStaysOneLayer) {
  run_on_device(2, [](int) {
    auto first = nn::Sequential(nn::BatchNorm1d(kChannels));
    nn::Sequential second;
    second->push_back("a", std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(first->ptr(0)));
    second->push_back("b", std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(first->ptr(0)));
    nn::ModuleList net(first, second);
    net->to(syncbn::test::device());
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_THAT(report.converted, ElementsAre("0.0"));
    EXPECT_THAT(report.refuse_one_value, IsEmpty());
    EXPECT_EQ(second->ptr(0), first->ptr(0));
    EXPECT_EQ(second->ptr(1), first->ptr(0));
    EXPECT_EQ(second->named_children()["b"], first->ptr(0));
    EXPECT_TRUE(second->forward(randn({1, kChannels})).defined());
  });
}

TEST_F(ConvertibleBatchNormTest, StatisticsOfOneValuePerRankAreUpdatedByTheirOwnPass) {
  run_on_device(2, [](int rank) {
    auto net = on_device(nn::Sequential(nn::BatchNorm1d(kChannels)));
    dist::convert_sync_batchnorm(*net);
    at::manual_seed(1);
    const at::Tensor batch = randn({2, kChannels});
    dist::update_bn_stats(
        *net, [&](int64_t) { net->forward(batch.narrow(0, rank, 1)); }, 1);
    EXPECT_TRUE(close(net->named_buffers()["0.running_mean"], batch.mean(0)));
  });
}

}  // namespace
