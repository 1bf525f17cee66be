#pragma once

// All collectives of SharedMemory, with known results.

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>

#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "groups/world.h"
#include "transport/backend.h"

namespace syncbn::test {

using Tensors = std::vector<at::Tensor>;

inline dist::detail::Backend& backend(const dist::ProcessGroupPtr& group = dist::default_group()) {
  return *dist::detail::backend_of(group);
}

/// Expects that every call used shared memory, unless the group has one rank.
inline void expect_all_shared(const dist::ProcessGroupPtr& group = dist::default_group()) {
  EXPECT_EQ(backend(group).shares_memory(), group->getSize() > 1);
  const uint64_t shared = group->getSize() > 1 ? backend(group).sequence() : 0;
  EXPECT_EQ(backend(group).shared_calls(), shared);
}

// No element, one, an odd number, and more than fit into one step.
inline constexpr int64_t kSizes[] = {0, 1, 7, 20'001, 200'003};

/// The first `size` elements, along the last dimension, of a repeated pattern of three.
inline at::Tensor repeated(const at::Tensor& pattern, int64_t size) {
  std::vector<int64_t> times(pattern.dim(), 1);
  times.back() = size / 3 + 1;
  return pattern.repeat(times).narrow(-1, 0, size).contiguous();
}

/// Rank r's values. They are small, so that results fit into every dtype, and repeat after three,
/// so that three elements determine the expected results.
inline at::Tensor values_of(int rank, int64_t size, at::ScalarType type) {
  const at::Tensor numbers = at::arange(3, at::kLong).add(rank).remainder(3);
  return repeated(type == at::kBool ? numbers.eq(1) : numbers.add(1).to(type), size);
}

inline at::Tensor all_values(int ranks, int64_t size, at::ScalarType type) {
  Tensors all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(values_of(rank, size, type));
  return at::stack(all);
}

inline at::Tensor reduced(const at::Tensor& all, c10d::ReduceOp::RedOpType op) {
  const at::Tensor numbers = all.to(at::isFloatingType(all.scalar_type()) ? at::kFloat : at::kLong);
  const bool is_bool = all.scalar_type() == at::kBool;
  switch (op) {
    case c10d::ReduceOp::SUM:
      return is_bool ? all.any(0) : numbers.sum(0).to(all.scalar_type());
    case c10d::ReduceOp::AVG:
      return (numbers.sum(0) / all.size(0)).to(all.scalar_type());
    case c10d::ReduceOp::PRODUCT:
      return numbers.prod(0).to(all.scalar_type());
    case c10d::ReduceOp::MIN:
      return all.amin(0);
    default:
      return all.amax(0);
  }
}

inline at::Tensor all_reduced(const at::Tensor& own,
                              c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
  Tensors tensors{own.clone()};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  dist::default_group()->allreduce(tensors, options)->wait();
  return tensors[0];
}

inline void reduce_everything(int rank) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                          at::kByte, at::kChar, at::kBool}) {
    for (const auto op :
         {c10d::ReduceOp::SUM, c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN, c10d::ReduceOp::MAX}) {
      for (const int64_t size : kSizes) {
        if (dist::world_size() == 1 && type == at::kBool) continue;  // Gloo has no bool
        SCOPED_TRACE(c10::str(type, " by ", static_cast<int>(op), " of ", size));
        const at::Tensor sum = all_reduced(values_of(rank, size, type), op);
        EXPECT_TRUE(
            sum.equal(repeated(reduced(all_values(dist::world_size(), 3, type), op), size)));
      }
    }
  }
}

inline void average_everything(int rank) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const int64_t size : kSizes) {
      const at::Tensor mean = all_reduced(values_of(rank, size, type), c10d::ReduceOp::AVG);
      const at::Tensor expected =
          repeated(reduced(all_values(dist::world_size(), 3, type), c10d::ReduceOp::AVG), size);
      EXPECT_TRUE(at::allclose(mean, expected, 1e-7, 0)) << c10::str(type, " ", size);
    }
  }
}

inline void gather_everything(int rank) {
  const int ranks = dist::world_size();
  const auto group = dist::default_group();
  for (const auto type : {at::kFloat, at::kHalf, at::kShort, at::kComplexDouble, at::kByte}) {
    for (const int64_t size : kSizes) {
      // A world of one uses Gloo, which has neither.
      if (ranks == 1 && (type == at::kShort || type == at::kComplexDouble)) continue;
      SCOPED_TRACE(c10::str(type, " of ", size));
      const at::Tensor all = all_values(ranks, size, type);
      at::Tensor own = values_of(rank, size, type);
      at::Tensor rows = at::zeros({ranks * size}, type);
      group->_allgather_base(rows, own)->wait();
      EXPECT_TRUE(rows.equal(all.view(-1)));
      std::vector<Tensors> lists{at::zeros({ranks, size}, type).unbind()};
      Tensors inputs{own};
      group->allgather(lists, inputs)->wait();
      EXPECT_TRUE(at::stack(lists[0]).equal(all));
    }
  }
}

inline void broadcast_everything(int rank) {
  for (const auto type : {at::kFloat, at::kHalf, at::kByte}) {
    for (const int64_t size : kSizes) {
      for (int root = 0; root < dist::world_size(); ++root) {
        at::Tensor tensor = values_of(rank, size, type);
        dist::broadcast(tensor, root);
        EXPECT_TRUE(tensor.equal(values_of(root, size, type))) << c10::str(type, " ", size);
      }
    }
  }
}

/// Expects the group to work, and to share memory if `shared`.
inline void expect_works(bool shared) {
  at::Tensor tensor = at::ones({70'000});
  dist::all_reduce(tensor);
  EXPECT_TRUE(tensor.equal(at::full({70'000}, static_cast<double>(dist::world_size()))));
  EXPECT_EQ(backend().shares_memory(), shared);
}

}  // namespace syncbn::test
