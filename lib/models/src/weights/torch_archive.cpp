#include <syncbn/models/torch_archive.h>

#include <ATen/core/jit_type.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <cerrno>
#include <fstream>
#include <utility>

#include <syncbn/base/atomic_file.h>

namespace syncbn::models {

Dict make_dict() {
  return Dict(c10::StringType::get(), c10::AnyType::get());
}

void put(Dict& dict, const std::string& key, c10::IValue value) {
  dict.insert(c10::IValue(key), std::move(value));
}

at::Tensor on_host(const at::Tensor& tensor) {
  at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
  const bool is_whole = host.storage().nbytes() == host.nbytes() && host.storage_offset() == 0;
  return is_whole ? host : host.clone();
}

void write_torch_archive(const Dict& dict, const Sink& sink) {
  // Not torch::pickle_save(): it tags dictionaries with types, which weights_only refuses.
  std::string pickled;
  const auto append_pickle = [&](const char* data, size_t size) { pickled.append(data, size); };
  torch::jit::Pickler pickler(append_pickle, /*tensor_table=*/nullptr,
                              /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
                              /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    sink({static_cast<const char*>(data), size});
    return size;
  });
  torch::jit::writeArchiveAndTensors("data", pickled.data(), pickled.size(), pickler.tensorData(),
                                     writer);
  writer.writeEndOfFile();
}

void write_parts(const std::filesystem::path& path, const std::function<void(const Sink&)>& write) {
  base::write_file_atomically(path, [&](const std::filesystem::path& temporary) {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    // An exception must not pass through libtorch's writer: keep the error until the end.
    int error = file ? 0 : errno;
    const auto keep_error = [&] {
      if (!file && error == 0) error = errno != 0 ? errno : EIO;
    };
    write([&](std::string_view part) {
      if (error == 0) file.write(part.data(), static_cast<std::streamsize>(part.size()));
      keep_error();
    });
    file.close();
    keep_error();
    if (error != 0) {
      base::throw_file_error(fmt::format("cannot write {}", path.string()), error);
    }
  });
}

}  // namespace syncbn::models
