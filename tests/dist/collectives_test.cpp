#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "dist/group.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using at::Tensor;
using c10d::ReduceOp;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::message_of;
using syncbn::test::run_group;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Every dtype can hold ones.
Tensor ones_of(at::ScalarType type) {
  return at::ones({2, 3}, type);
}

Tensor bools(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong).to(at::kBool);
}

constexpr at::ScalarType kReducible[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                         at::kChar,  at::kByte,   at::kInt,  at::kLong};
constexpr at::ScalarType kOthers[] = {at::kShort, at::kBool, at::kComplexFloat, at::kComplexDouble};

TEST(CollectivesTest, AllReduceKnowsEveryReducibleDtype) {
  run_group(2, [](int) {
    for (const at::ScalarType type : kReducible) {
      Tensor tensor = ones_of(type);
      dist::all_reduce(tensor);
      EXPECT_TRUE(tensor.equal(ones_of(type) * 2)) << c10::toString(type);
    }
  });
}

TEST(CollectivesTest, AllReduceOfBoolsIsAnyOrAll) {
  run_group(2, [](int rank) {
    const Tensor own = bools({rank == 0, 0, 1});
    Tensor any = own.clone();
    dist::all_reduce(any);
    EXPECT_TRUE(any.equal(bools({1, 0, 1})));
    Tensor all = own.clone();
    dist::all_reduce(all, ReduceOp::PRODUCT);
    EXPECT_TRUE(all.equal(bools({0, 0, 1})));
  });
}

TEST(CollectivesTest, AllReduceAddsComplexNumbersAndTakesConjugatesForWhatTheyAre) {
  run_group(2, [](int rank) {
    const Tensor real = at::full({3}, rank + 1.0);
    Tensor tensor = at::complex(real, real).conj();
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(at::complex(at::full({3}, 3.0), at::full({3}, -3.0))));
    EXPECT_THAT(message_of<UserError>([&] { dist::all_reduce(tensor, ReduceOp::MAX); }),
                HasSubstr("cannot reduce ComplexFloat other than by SUM"));
  });
}

TEST(CollectivesTest, DtypesThatCannotBeReducedAreRefusedByName) {
  run_group(2, [](int) {
    Tensor tensor = ones_of(at::kShort);
    EXPECT_THAT(message_of<UserError>([&] { dist::all_reduce(tensor); }),
                AllOf(HasSubstr("all_reduce on rank "), HasSubstr("of group '0' was refused"),
                      HasSubstr("cannot reduce Short")));
  });
}

TEST(CollectivesTest, AnyDtypeCanBeMoved) {
  run_group(2, [](int rank) {
    std::vector<at::ScalarType> types(std::begin(kReducible), std::end(kReducible));
    types.insert(types.end(), std::begin(kOthers), std::end(kOthers));
    for (const at::ScalarType type : types) {
      SCOPED_TRACE(c10::toString(type));
      const Tensor ones = ones_of(type);
      const Tensor zeros = at::zeros_like(ones);
      const Tensor own = rank == 0 ? ones : zeros;
      Tensor tensor = own.clone();
      dist::broadcast(tensor, 0);
      EXPECT_TRUE(tensor.equal(ones));
      const auto gathered = dist::all_gather(own);
      ASSERT_EQ(gathered.size(), 2U);
      EXPECT_TRUE(gathered[0].equal(ones));
      EXPECT_TRUE(gathered[1].equal(zeros));
      std::vector<Tensor> outputs{at::empty_like(ones), at::empty_like(ones)};
      dist::all_to_all(outputs, {own, own});
      EXPECT_TRUE(outputs[0].equal(ones));
      EXPECT_TRUE(outputs[1].equal(zeros));
      if (rank == 0) dist::send(own, 1);
      if (rank == 1) {
        Tensor received = zeros.clone();
        dist::recv(received, 0);
        EXPECT_TRUE(received.equal(ones));
      }
    }
  });
}

TEST(CollectivesTest, ReduceLeavesOtherRanksTensorsAlone) {
  run_group(3, [](int rank) {
    Tensor whole = at::full({2, 3}, rank + 1.0);
    Tensor column = whole.select(1, 1);
    dist::reduce(column, 2);
    EXPECT_TRUE(column.equal(at::full({2}, rank == 2 ? 6.0 : rank + 1.0)));
    EXPECT_TRUE(whole.select(1, 0).equal(at::full({2}, rank + 1.0)));
  });
}

TEST(CollectivesTest, GatherAndScatterAreEachOthersInverse) {
  run_group(3, [](int rank) {
    const Tensor own = at::full({2, 2}, rank * 10).t();
    const auto parts = dist::gather(own, 1);
    EXPECT_EQ(parts.size(), rank == 1 ? 3U : 0U);
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(parts[i].equal(at::full({2, 2}, static_cast<int64_t>(i) * 10)));
    }
    Tensor back = at::zeros({2, 2}, at::kLong);
    dist::scatter(back, parts, 1);
    EXPECT_TRUE(back.equal(own));
  });
}

TEST(CollectivesTest, ReduceScatterLeavesEachRankItsPart) {
  run_group(3, [](int rank) {
    std::vector<Tensor> parts;
    for (int to = 0; to < 3; ++to) parts.push_back(at::full({2, 2}, (rank + 1.0) * (to + 1)));
    Tensor output = at::zeros({2, 2}, at::kDouble).t();
    for (Tensor& one : parts) one = one.to(at::kDouble);
    dist::reduce_scatter(output, parts);
    EXPECT_TRUE(output.equal(at::full({2, 2}, 6.0 * (rank + 1), at::kDouble)));
  });
}

TEST(CollectivesTest, AllToAllTakesTensorsOfDifferentSizes) {
  run_group(3, [](int rank) {
    // Rank r sends r + to elements to rank `to`; ranks 0 and 0 exchange nothing.
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    for (int other = 0; other < 3; ++other) {
      inputs.push_back(at::full({rank + other}, rank * 10 + other));
      outputs.push_back(at::zeros({rank + other}, at::kLong));
    }
    dist::all_to_all(outputs, inputs);
    for (int from = 0; from < 3; ++from) {
      EXPECT_TRUE(
          outputs[static_cast<size_t>(from)].equal(at::full({rank + from}, from * 10 + rank)));
    }
  });
}

TEST(CollectivesTest, AllToAllSingleSplitsRows) {
  run_group(2, [](int rank) {
    const Tensor input = at::arange(8).view({4, 2}) + 100 * rank;
    Tensor equal = at::zeros({4, 2}, at::kLong);
    dist::all_to_all_single(equal, input);
    const Tensor pairs = at::tensor({0, 1, 2, 3}, at::kLong).view({2, 2}) + 4 * rank;
    EXPECT_TRUE(equal.equal(at::cat({pairs, pairs + 100})));
    // Rank 0 keeps one row and sends three, rank 1 sends all but one.
    const std::vector<int64_t> splits = {rank == 0 ? 1 : 3, rank == 0 ? 3 : 1};
    Tensor uneven = at::zeros({4, 2}, at::kLong);
    dist::all_to_all_single(uneven, input, splits, splits);
    const Tensor own = at::arange(8).view({4, 2});
    const Tensor expected = rank == 0 ? at::cat({own.slice(0, 0, 1), own.slice(0, 0, 3) + 100})
                                      : at::cat({own.slice(0, 1, 4), own.slice(0, 3, 4) + 100});
    EXPECT_TRUE(uneven.equal(expected)) << uneven;
  });
}

TEST(CollectivesTest, SendAndRecvMatchByTag) {
  run_group(2, [](int rank) {
    if (rank == 0) {
      // Not send(): with Gloo it returns only when the other rank has called recv().
      std::vector<Tensor> seven{at::full({2}, 7.0)};
      std::vector<Tensor> eight{at::full({2}, 8.0)};
      const auto first = dist::default_group()->send(seven, 1, 7);
      const auto second = dist::default_group()->send(eight, 1, 8);
      second->wait();
      first->wait();
      return;
    }
    Tensor whole = at::zeros({2, 2});
    Tensor second = whole.select(1, 1);
    dist::recv(second, 0, {}, /*tag=*/8);
    EXPECT_TRUE(second.equal(at::full({2}, 8.0)));
    dist::recv(second, 0, {}, /*tag=*/7);
    EXPECT_TRUE(second.equal(at::full({2}, 7.0)));
    EXPECT_TRUE(whole.select(1, 0).equal(at::zeros({2})));
  });
}

TEST(CollectivesTest, BytesMayHaveAnyLength) {
  run_group(3, [](int rank) {
    const std::string own(static_cast<size_t>(rank) * 1000, static_cast<char>(rank - 1));
    const std::string b(1000, '\0');
    const std::string c(2000, '\1');
    EXPECT_EQ(dist::broadcast_bytes(own, 1), b);
    EXPECT_EQ(dist::broadcast_bytes(own, 0), "");
    EXPECT_THAT(dist::all_gather_bytes(own), ElementsAre("", b, c));
    const auto gathered = dist::gather_bytes(own, 2);
    if (rank == 2) {
      EXPECT_THAT(gathered, ElementsAre("", b, c));
    } else {
      EXPECT_THAT(gathered, IsEmpty());
    }
    EXPECT_EQ(dist::scatter_bytes(gathered, 2), own);
    EXPECT_THAT(dist::all_gather_bytes(""), ElementsAre("", "", ""));
    EXPECT_THAT(dist::gather_bytes("", 0).size(), rank == 0 ? 3 : 0);
  });
}

TEST(CollectivesTest, ArgumentsAreRefusedBeforeAnythingIsSent) {
  run_group(2, [](int rank) {
    Tensor tensor = at::ones({2});
    Tensor undefined;
    Tensor sparse = at::ones({2}).to_sparse();
    Tensor overlapping = at::ones({1}).expand({2});
    std::vector<Tensor> one{tensor};
    std::vector<Tensor> unequal{tensor, at::ones({3})};
    std::vector<Tensor> outputs{at::ones({2}), at::ones({2})};
    std::vector<Tensor> longs{at::ones({2}, at::kLong), at::ones({2}, at::kLong)};
    const auto said = [](auto body) { return message_of<UserError>(body); };
    EXPECT_THAT(said([&] { dist::all_reduce(undefined); }), HasSubstr("undefined"));
    EXPECT_THAT(said([&] { dist::all_gather(sparse); }), HasSubstr("sparse"));
    EXPECT_THAT(said([&] { dist::broadcast(overlapping, 0); }), HasSubstr("share memory"));
    EXPECT_THAT(said([&] { dist::broadcast(tensor, 2); }),
                HasSubstr("root 2 is outside the group of 2 ranks"));
    EXPECT_THAT(said([&] { dist::gather(tensor, -1); }), HasSubstr("root -1"));
    EXPECT_THAT(said([&] { dist::scatter(tensor, one, rank); }),
                HasSubstr("parts has length 1, and the group has 2 ranks"));
    EXPECT_THAT(said([&] { dist::scatter(tensor, unequal, rank); }),
                HasSubstr("parts[1] has the sizes [3], and this rank's tensor [2]"));
    EXPECT_THAT(said([&] { dist::scatter(tensor, outputs, 1 - rank); }),
                HasSubstr("is the one that has them"));
    EXPECT_THAT(said([&] { dist::reduce_scatter(tensor, unequal); }), HasSubstr("parts[1]"));
    EXPECT_THAT(said([&] { dist::all_to_all(outputs, longs); }),
                AllOf(HasSubstr("Float"), HasSubstr("Long")));
    EXPECT_THAT(said([&] { dist::all_to_all_single(tensor, at::ones({3})); }),
                HasSubstr("3 rows cannot be split evenly among 2 ranks"));
    EXPECT_THAT(said([&] {
                  dist::all_to_all_single(tensor, tensor, {1, 1}, {2, 1});
                }),
                HasSubstr("input_split_sizes add up to 3, and the tensor has 2 rows"));
    EXPECT_THAT(said([&] { dist::send(tensor, rank); }), HasSubstr("this rank itself"));
    EXPECT_THAT(said([&] { dist::recv(tensor, 1 - rank, {}, -1); }), HasSubstr("tag -1"));
    EXPECT_THAT(said([&] { dist::barrier({}, milliseconds(0)); }), HasSubstr("timeout of 0 ms"));
    // The two ranks still make the same calls.
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(at::full({2}, 2.0F)));
  });
}

TEST(CollectivesTest, ATimeoutIsThatOfTheCall) {
  run_group(2, [](int rank) {
    dist::barrier({}, std::chrono::seconds(20));
    Tensor tensor = at::ones({2});
    // No rank sends. Rank 1's wait ends when rank 0's does.
    if (rank == 0) {
      EXPECT_THAT(
          message_of<UnavailableError>([&] { dist::recv(tensor, 1, {}, 0, milliseconds(200)); }),
          AllOf(HasSubstr("recv #"), HasSubstr("200ms")));
    } else {
      EXPECT_THROW(dist::recv(tensor, 0), UnavailableError);
    }
  });
}

TEST(CollectivesTest, AllToAllComparesWhatIsSentAndExpected) {
  run_group(3, [](int rank) {
    // Rank 2 expects more from rank 0 than rank 0 sends.
    std::vector<at::Tensor> inputs(3, at::ones({2}));
    std::vector<at::Tensor> outputs;
    for (int from = 0; from < 3; ++from) {
      outputs.push_back(at::zeros({rank == 2 && from == 0 ? 3 : 2}));
    }
    EXPECT_THAT(message_of<UserError>([&] { dist::all_to_all(outputs, inputs); }),
                AllOf(HasSubstr("all_to_all #2 of group '0' was refused"),
                      HasSubstr("rank 0 sends 2 elements to rank 2, which expects 3")));
    if (rank == 2) outputs[0] = at::zeros({2});
    dist::all_to_all(outputs, inputs);
    EXPECT_TRUE(outputs[0].equal(at::ones({2})));
  });
}

TEST(CollectivesTest, OperationsThatDoNotFitTheDtypeAreRefused) {
  run_group(1, [](int) {
    at::Tensor floats = at::ones({2});
    at::Tensor integers = at::ones({2}, at::kLong);
    const auto refusal = [](at::Tensor& tensor, c10d::ReduceOp op) {
      return message_of<UserError>([&] { dist::all_reduce(tensor, std::move(op)); });
    };
    EXPECT_THAT(refusal(floats, c10d::ReduceOp::BAND), HasSubstr("bitwise"));
    EXPECT_THAT(refusal(integers, c10d::ReduceOp::AVG), HasSubstr("AVG cannot reduce Long"));
    at::Tensor meta = at::empty({2}, at::kMeta);
    EXPECT_THAT(refusal(meta, c10d::ReduceOp::SUM), HasSubstr("on meta"));
    dist::all_reduce(floats, c10d::ReduceOp::SUM, {}, std::chrono::milliseconds::max());
  });
}

}  // namespace
