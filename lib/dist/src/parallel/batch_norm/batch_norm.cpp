#include <syncbn/dist/batch_norm.h>

#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"
#include "batch_norm/replica_scope.h"

namespace syncbn::dist::detail {

// The forward() of libtorch 2.11 calls _check_input_dim(), then is_training() twice, then
// aten::batch_norm. The first answer decides whether the batch counts; the second decides the
// refusal of one value per channel, and is hidden: aten::batch_norm finds the OneValueForward and
// trains nevertheless.

template <class Base>
void ConvertibleBatchNorm<Base>::_check_input_dim(const at::Tensor& input) {
  Base::_check_input_dim(input);
  OneValueForward::current = {};
  // Without running statistics, the options change below: other threads must not read them.
  if (input.numel() != input.size(1) || !this->is_training() ||
      !shares_statistics(this->running_mean, this->weight) ||
      (!this->running_mean.defined() && ReplicaScope::shares_layers())) {
    return;
  }
  const at::Tensor& key = layer_key(this->running_mean, this->weight);
  OneValueForward::current = {.layer = this,
                              .key = ReplicaScope::original_of(key.unsafeGetTensorImpl()),
                              .options = &this->options};
  // With false, forward() would train whatever the second answer.
  if (!this->running_mean.defined()) this->options.track_running_stats(true);
}

template <class Base>
bool ConvertibleBatchNorm<Base>::is_training() const noexcept {
  OneValueForward& forward = OneValueForward::current;
  return Base::is_training() && !(forward.layer == this && ++forward.answers == 2);
}

template <class Base>
std::shared_ptr<torch::nn::Module> ConvertibleBatchNorm<Base>::clone(
    const std::optional<at::Device>& device) const {
  return std::make_shared<ConvertibleBatchNorm>(
      *std::dynamic_pointer_cast<Base>(Base::clone(device)));
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
