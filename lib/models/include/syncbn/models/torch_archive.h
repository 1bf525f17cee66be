#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

namespace syncbn::models {

/// Values by name, as Python's torch.load(weights_only=True) reads them from a torch archive.
using Dict = c10::impl::GenericDict;

Dict make_dict();
void put(Dict& dict, const std::string& key, c10::IValue value);

/// The tensor on the CPU in its own storage: write_torch_archive() writes whole storages.
at::Tensor on_host(const at::Tensor& tensor);

/// Receives the bytes of a file, part by part.
using Sink = std::function<void(std::string_view bytes)>;

/// Writes a zip archive like torch.save's, tensor by tensor.
void write_torch_archive(const Dict& dict, const Sink& sink);

/// Writes a file like base::write_file_atomically(), part by part.
/// @throws base::UserError or base::UnavailableError naming the file
void write_parts(const std::filesystem::path& path, const std::function<void(const Sink&)>& write);

/// Reads a file of torch.save. None, bool, int, float, text and tensors stay as they are; lists,
/// tuples and sets become lists; dictionaries and the attributes of objects, such as an
/// argparse.Namespace, become dictionaries with keys of text or int. Any other object becomes a
/// tuple of one text, its type. Executes nothing in the file, see read_state_dict(). Tensors share
/// the file's pages. Thread-safe.
/// @throws base::UserError naming the file and what is wrong with it; base::UnavailableError if the
///   disk fails.
c10::IValue read_torch_values(const std::filesystem::path& path);

/// Reads the bytes of such a file, which must not be empty. Tensors share one copy of the bytes.
/// Thread-safe.
/// @throws base::UserError saying what is wrong with the bytes.
c10::IValue parse_torch_values(std::string_view bytes);

}  // namespace syncbn::models
