// The Python module syncbn._C, which makes lib/dist a backend of Python's torch.distributed.
#include <syncbn/base/log.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>

#include "batch_norm/batch_norm_function.h"
#include "groups/world.h"

namespace syncbn::python {
namespace {

using dist::ProcessGroupPtr;
using dist::detail::BatchNormArguments;
using dist::detail::LayerName;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

BackendPtr backend_of(const ProcessGroupPtr& group) {
  return group->getDefaultBackend();
}

BackendPtr init_process_group(const StorePtr& store, int rank, int world_size, milliseconds timeout,
                              std::optional<int> gpu) {
  base::init_logging(rank);
  dist::InitOptions options{.timeout = timeout, .rank = rank, .world_size = world_size};
  options.connect_timeout = std::min(options.connect_timeout, timeout);
  return backend_of(dist::detail::init_process_group(store, options, gpu));
}

BackendPtr join_group(const std::string& name, const std::vector<int>& ranks,
                      milliseconds timeout) {
  return backend_of(dist::detail::join_group(name, ranks, timeout));
}

at::Tensor sync_batch_norm(const at::Tensor& input, std::optional<at::Tensor> weight,
                           std::optional<at::Tensor> bias, std::optional<at::Tensor> running_mean,
                           std::optional<at::Tensor> running_var,
                           std::optional<at::Tensor> num_batches_tracked,
                           std::optional<double> momentum, double eps, const LayerName& layer,
                           const ProcessGroupPtr& group) {
  const auto or_undefined = [](std::optional<at::Tensor>& tensor) {
    return tensor ? std::move(*tensor) : at::Tensor();
  };
  const BatchNormArguments arguments{.input = input,
                                     .weight = or_undefined(weight),
                                     .bias = or_undefined(bias),
                                     .running_mean = or_undefined(running_mean),
                                     .running_var = or_undefined(running_var),
                                     .num_batches_tracked = or_undefined(num_batches_tracked),
                                     .momentum = momentum,
                                     .eps = eps,
                                     .residual = {}};
  return dist::detail::sync_batch_norm(
             arguments, layer, [&] { return dist::detail::statistics_group(group); }, std::nullopt)
      .output;
}

void translate_errors() {
  // DistBackendError as from other backends; it is a subclass of RuntimeError.
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const base::UnavailableError& failure) {
      const auto type = py::module_::import("torch.distributed").attr("DistBackendError");
      PyErr_SetString(type.ptr(), failure.what());
    }
  });
}

}  // namespace
}  // namespace syncbn::python

PYBIND11_MODULE(_C, module) {
  using namespace syncbn::python;
  py::module_::import("torch");
  translate_errors();
  using release_gil = py::call_guard<py::gil_scoped_release>;
  module.def("init_process_group", &init_process_group, release_gil(), py::arg("store"),
             py::arg("rank"), py::arg("world_size"), py::arg("timeout"), py::arg("gpu"));
  module.def("join_group", &join_group, release_gil(), py::arg("name"), py::arg("ranks"),
             py::arg("timeout"));
  module.def("is_initialized", &syncbn::dist::is_initialized);
  module.def("destroy_process_group", &syncbn::dist::destroy_process_group, release_gil());
  py::class_<LayerName>(module, "Layer")
      .def(py::init([](const std::string& name) { return LayerName{.given = name}; }),
           py::arg("name"));
  module.def("sync_batch_norm", &sync_batch_norm, release_gil());
}
