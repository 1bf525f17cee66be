#include <syncbn/dist/batch_norm.h>

#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>

#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"

namespace syncbn::dist::detail {

template <class Base>
ConvertibleBatchNorm<Base>::ConvertibleBatchNorm(std::shared_ptr<Base> replaced)
    : Base(*replaced), replaced_(std::move(replaced)) {}

// libtorch refuses one value per channel before it calls aten::batch_norm, in which converted
// layers exchange. For such an input, this calls aten::batch_norm itself.
template <class Base>
at::Tensor ConvertibleBatchNorm<Base>::forward(const at::Tensor& input) {
  this->_check_input_dim(input);
  const bool is_one_value = input.numel() == input.size(1);
  if (!is_one_value || !this->is_training() ||
      !shares_statistics(this->running_mean, this->weight)) {
    return Base::forward(input);
  }
  double momentum = this->options.momentum().value_or(0);
  if (this->num_batches_tracked.defined()) {
    this->num_batches_tracked += 1;
    if (!this->options.momentum()) momentum = 1 / this->num_batches_tracked.template item<double>();
  }
  return at::batch_norm(input, this->weight, this->bias, this->running_mean, this->running_var,
                        /*training=*/true, momentum, this->options.eps(),
                        at::globalContext().userEnabledCuDNN());
}

template <class Base>
std::shared_ptr<torch::nn::Module> ConvertibleBatchNorm<Base>::clone(
    const std::optional<at::Device>& device) const {
  const auto copy =
      std::make_shared<ConvertibleBatchNorm>(std::dynamic_pointer_cast<Base>(Base::clone(device)));
  if (!replaced_) copy->replaced_ = nullptr;
  return copy;
}

// Code that holds a reference to the replaced layer still calls it.
template <class Base>
void ConvertibleBatchNorm<Base>::train(bool on) {
  Base::train(on);
  if (replaced_) replaced_->train(on);
}

template <class Base>
void ConvertibleBatchNorm<Base>::pretty_print(std::ostream& stream) const {
  if (converted_group(this->running_mean, this->weight)) {
    print_sync_batch_norm(stream, this->options);
  } else {
    Base::pretty_print(stream);
  }
}

template class ConvertibleBatchNorm<torch::nn::BatchNorm1dImpl>;
template class ConvertibleBatchNorm<torch::nn::BatchNorm2dImpl>;
template class ConvertibleBatchNorm<torch::nn::BatchNorm3dImpl>;

}  // namespace syncbn::dist::detail
