#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

namespace syncbn::models {

/// Values by name, which Python's torch.load(weights_only=True) reads from a torch archive.
using Dict = c10::impl::GenericDict;

Dict make_dict();
void put(Dict& dict, const std::string& key, c10::IValue value);

/// The tensor on the CPU with a storage of its own, since whole storages are written.
at::Tensor on_host(const at::Tensor& tensor);

/// Takes the bytes of a file, part by part.
using Sink = std::function<void(std::string_view bytes)>;

/// Writes the zip archive that torch.save writes, tensor by tensor.
void write_torch_archive(const Dict& dict, const Sink& sink);

/// Writes a file as base::write_file_atomically() does, part by part.
/// @throws base::UserError or base::UnavailableError naming the file
void write_parts(const std::filesystem::path& path, const std::function<void(const Sink&)>& write);

}  // namespace syncbn::models
