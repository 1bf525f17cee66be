#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <cstring>

#include "gather_rows.h"

namespace syncbn::dist {
namespace {

ProcessGroupPtr or_default(const ProcessGroupPtr& group) {
  return group ? group : default_group();
}

void require_dense(const at::Tensor& tensor, const char* collective) {
  if (!tensor.defined()) {
    throw base::UserError(fmt::format("{}: the tensor is undefined", collective));
  }
  if (tensor.layout() != at::kStrided) {
    throw base::UserError(fmt::format("{}: the tensor is sparse; make it dense first", collective));
  }
}

/// Runs an in-place collective on a tensor of any strides. The data only: autograd knows nothing of
/// collectives.
template <class Run>
void in_place(at::Tensor& tensor, Run run) {
  const at::Tensor data = tensor.detach();
  std::vector<at::Tensor> buffers{data.contiguous()};
  run(buffers);
  if (!buffers[0].is_same(data) && !buffers[0].is_alias_of(data)) data.copy_(buffers[0]);
}

}  // namespace

void all_reduce(at::Tensor& tensor, c10d::ReduceOp op, const ProcessGroupPtr& group) {
  require_dense(tensor, "all_reduce");
  const auto on = or_default(group);
  in_place(tensor, [&](std::vector<at::Tensor>& buffers) {
    c10d::AllreduceOptions options;
    options.reduceOp = std::move(op);
    on->allreduce(buffers, options)->wait();
  });
}

std::vector<at::Tensor> all_gather(const at::Tensor& tensor, const ProcessGroupPtr& group) {
  require_dense(tensor, "all_gather");
  const auto on = or_default(group);
  const at::Tensor row = tensor.detach().contiguous().view({1, tensor.numel()});
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& one : detail::gather_rows(row, on).unbind()) {
    outputs.push_back(one.view(tensor.sizes()));
  }
  return outputs;
}

void broadcast(at::Tensor& tensor, int root, const ProcessGroupPtr& group) {
  require_dense(tensor, "broadcast");
  const auto on = or_default(group);
  if (root < 0 || root >= on->getSize()) {
    throw base::UserError(
        fmt::format("broadcast: root {} is outside the group of {} ranks", root, on->getSize()));
  }
  in_place(tensor, [&](std::vector<at::Tensor>& buffers) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    on->broadcast(buffers, options)->wait();
  });
}

std::string broadcast_bytes(const std::string& bytes, int root, const ProcessGroupPtr& group) {
  at::Tensor size = at::scalar_tensor(static_cast<int64_t>(bytes.size()), at::kLong);
  broadcast(size, root, group);
  if (size.item<int64_t>() == 0) return "";
  at::Tensor buffer = at::empty({size.item<int64_t>()}, at::kByte);
  const bool is_root = rank(group) == root;
  if (is_root) std::memcpy(buffer.data_ptr(), bytes.data(), bytes.size());
  broadcast(buffer, root, group);
  if (is_root) return bytes;
  return {static_cast<const char*>(buffer.data_ptr()), static_cast<size_t>(buffer.numel())};
}

void barrier(const ProcessGroupPtr& group) {
  or_default(group)->barrier()->wait();
}

}  // namespace syncbn::dist
