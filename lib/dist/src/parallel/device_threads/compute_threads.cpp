#include "device_threads/compute_threads.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace syncbn::dist::detail {

at::Device checked_device(const char* wrapper, at::Device device) {
  if (device.is_cpu() && device.index() <= 0) return at::kCPU;
  if (device.is_cuda()) {
    const auto count = static_cast<int>(at::globalContext().hasCUDA() ? at::getNumGPUs() : 0);
    if (!device.has_index() && count > 0) return {at::kCUDA, 0};
    if (device.has_index() && device.index() < count) return device;
  }
  throw base::UserError(fmt::format("{}: there is no device {} here", wrapper, device.str()));
}

ComputeThreads::ComputeThreads(const char* owner, std::vector<at::Device> devices)
    : devices_(std::move(devices)),
      threads_(owner, static_cast<int>(devices_.size()),
               [all = at::get_num_threads(), count = static_cast<int>(devices_.size())] {
                 at::get_num_threads();  // its first call on a thread undoes set_num_threads()
                 at::set_num_threads(std::max(1, all / count));
               }) {
  at::set_num_threads(at::get_num_threads());  // restores the global number, for later threads
}

void ComputeThreads::run(int count, const std::function<void(int)>& work) {
  std::vector<c10::Stream> streams;
  for (const at::Device& device : devices_) {
    if (!device.is_cuda()) continue;
    streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  const at::ThreadLocalState state;
  threads_.run(count, [&](int index) {
    const at::ThreadLocalStateGuard modes(state);
    if (streams.empty()) return work(index);
    const c10::MultiStreamGuard on_streams(streams);
    const c10::DeviceGuard device(devices_[static_cast<size_t>(index)]);
    work(index);
  });
}

}  // namespace syncbn::dist::detail
