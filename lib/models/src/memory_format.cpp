#include <syncbn/models/memory_format.h>

#include <algorithm>

#include <torch/nn/modules/conv.h>

namespace syncbn::models {

at::MemoryFormat preferred_memory_format(const torch::nn::Module& module) {
  const auto modules = module.modules(/*include_self=*/true);
  const bool faster = std::ranges::any_of(modules, [](const auto& one) {
    return one->template as<torch::nn::Conv2dImpl>() != nullptr;
  });
  return faster ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

void to_memory_format(torch::nn::Module& module, at::MemoryFormat format) {
  const auto convert = [format](at::Tensor& tensor) {
    if (tensor.defined() && tensor.dim() == 4) tensor.set_data(tensor.detach().contiguous(format));
  };
  for (at::Tensor& parameter : module.parameters()) convert(parameter);
  for (at::Tensor& buffer : module.buffers()) convert(buffer);
}

}  // namespace syncbn::models
