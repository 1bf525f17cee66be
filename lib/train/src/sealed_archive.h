#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

namespace syncbn::train {

/// What a checkpoint file holds: values by name, which Python reads with weights_only=True.
using Dict = c10::impl::GenericDict;

Dict make_dict();
void put(Dict& dict, const std::string& key, c10::IValue value);

/// The tensor on the CPU with a storage of its own, since whole storages are written.
at::Tensor on_host(const at::Tensor& tensor);

/// A zip archive as torch.save writes it, with a checksum of the whole at its end.
std::string sealed_archive(const Dict& dict);

/// Writes the same bytes, tensor by tensor, as base::write_file_atomically() does.
void write_sealed_archive(const Dict& dict, const std::filesystem::path& path);

bool is_sealed(std::string_view bytes);

/// Whether the bytes are those of Python's torch.save.
bool is_of_python(std::string_view bytes);

/// The values of a sealed archive. @throws libtorch's exceptions for other bytes.
c10::IValue open_archive(const std::string& bytes);

}  // namespace syncbn::train
