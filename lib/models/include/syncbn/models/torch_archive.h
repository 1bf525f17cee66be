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

/// What torch.save has written: None, bool, int, float, text and tensors as they are; lists, tuples
/// and sets as lists; dictionaries and the attributes of objects, such as an argparse.Namespace, as
/// dictionaries with keys of text or int. Nothing in a file is executed, see read_state_dict().
/// Tensors share the file's pages.
/// @throws base::UserError naming the file and what is wrong with it; base::UnavailableError when
///   the disk fails. Thread-safe.
c10::IValue read_torch_values(const std::filesystem::path& path);

/// The same, of a file's bytes, which are not empty. Tensors share one copy of them.
/// @throws base::UserError with what is wrong with the bytes. Thread-safe.
c10::IValue parse_torch_values(std::string_view bytes);

}  // namespace syncbn::models
