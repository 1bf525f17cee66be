#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace syncbn::dist {
namespace {

at::Tensor size_of(const std::string& bytes) {
  return at::scalar_tensor(static_cast<int64_t>(bytes.size()), at::kLong);
}

/// Padded by zeros to `size`.
at::Tensor to_tensor(const std::string& bytes, int64_t size) {
  at::Tensor tensor = at::zeros({size}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string to_bytes(const at::Tensor& tensor, int64_t size) {
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<size_t>(size)};
}

/// @param gather takes this rank's bytes, padded to the longest rank's, and returns all ranks'.
template <class Gather>
std::vector<std::string> gather_padded(const std::string& bytes, const ProcessGroupPtr& group,
                                       Timeout timeout, Gather gather) {
  const std::vector<at::Tensor> sizes = all_gather(size_of(bytes), group, timeout);
  int64_t longest = 1;  // Gloo gathers no empty tensors
  for (const at::Tensor& size : sizes) longest = std::max(longest, size.item<int64_t>());
  const std::vector<at::Tensor> tensors = gather(to_tensor(bytes, longest));
  std::vector<std::string> list;
  for (size_t rank = 0; rank < tensors.size(); ++rank) {
    list.push_back(to_bytes(tensors[rank], sizes[rank].item<int64_t>()));
  }
  return list;
}

}  // namespace

std::string broadcast_bytes(const std::string& bytes, int root, const ProcessGroupPtr& group,
                            Timeout timeout) {
  at::Tensor size = size_of(bytes);
  broadcast(size, root, group, timeout);
  const auto length = size.item<int64_t>();
  if (length == 0) return "";
  const bool is_root = rank(group) == root;
  at::Tensor buffer = is_root ? to_tensor(bytes, length) : at::empty({length}, at::kByte);
  broadcast(buffer, root, group, timeout);
  return is_root ? bytes : to_bytes(buffer, length);
}

std::vector<std::string> all_gather_bytes(const std::string& bytes, const ProcessGroupPtr& group,
                                          Timeout timeout) {
  return gather_padded(bytes, group, timeout,
                       [&](const at::Tensor& own) { return all_gather(own, group, timeout); });
}

std::vector<std::string> gather_bytes(const std::string& bytes, int root,
                                      const ProcessGroupPtr& group, Timeout timeout) {
  return gather_padded(bytes, group, timeout,
                       [&](const at::Tensor& own) { return gather(own, root, group, timeout); });
}

std::string scatter_bytes(const std::vector<std::string>& parts, int root,
                          const ProcessGroupPtr& group, Timeout timeout) {
  int64_t longest = 1;
  for (const std::string& one : parts) {
    longest = std::max(longest, static_cast<int64_t>(one.size()));
  }
  std::vector<at::Tensor> tensors;
  tensors.reserve(parts.size());
  for (const std::string& one : parts) {
    tensors.push_back(at::tensor({static_cast<int64_t>(one.size()), longest}, at::kLong));
  }
  at::Tensor sizes = at::zeros({2}, at::kLong);
  scatter(sizes, tensors, root, group, timeout);
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    tensors[rank] = to_tensor(parts[rank], longest);
  }
  at::Tensor buffer = at::zeros({sizes[1].item<int64_t>()}, at::kByte);
  scatter(buffer, tensors, root, group, timeout);
  return to_bytes(buffer, sizes[0].item<int64_t>());
}

}  // namespace syncbn::dist
