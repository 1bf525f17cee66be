#pragma once

#include <memory>
#include <optional>
#include <ostream>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

namespace syncbn::dist {

namespace detail {

/// Has no members of its own, because convert_sync_batchnorm() makes libtorch's layers objects of
/// this class in place.
/// @tparam Base torch::nn::BatchNorm1dImpl, BatchNorm2dImpl or BatchNorm3dImpl
template <class Base>
class ConvertibleBatchNorm : public Base {
 public:
  using Base::Base;

  /// A layer with the same tensors as `other`.
  explicit ConvertibleBatchNorm(const Base& other) : Base(other) {}

  /// @param input of the dimensions that Base takes
  at::Tensor forward(const at::Tensor& input) { return Base::forward(input); }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
  bool is_training() const noexcept override;
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;
};

extern template class ConvertibleBatchNorm<torch::nn::BatchNorm1dImpl>;
extern template class ConvertibleBatchNorm<torch::nn::BatchNorm2dImpl>;
extern template class ConvertibleBatchNorm<torch::nn::BatchNorm3dImpl>;

}  // namespace detail

/// Drop-ins for torch::nn::BatchNorm1d, 2d and 3d, derived from them: the same options, tensors,
/// names, messages and results. Once convert_sync_batchnorm() has converted them, they print as
/// SyncBatchNorm and accept one value per channel on a rank (image pooling at one image per rank),
/// which libtorch's layers refuse. All ranks together still need more than one value per channel.
using BatchNorm1dImpl = detail::ConvertibleBatchNorm<torch::nn::BatchNorm1dImpl>;
using BatchNorm2dImpl = detail::ConvertibleBatchNorm<torch::nn::BatchNorm2dImpl>;
using BatchNorm3dImpl = detail::ConvertibleBatchNorm<torch::nn::BatchNorm3dImpl>;
TORCH_MODULE(BatchNorm1d);
TORCH_MODULE(BatchNorm2d);
TORCH_MODULE(BatchNorm3d);

}  // namespace syncbn::dist
