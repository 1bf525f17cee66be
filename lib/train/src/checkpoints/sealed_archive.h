#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <syncbn/models/torch_archive.h>

namespace syncbn::train {

using models::Dict;
using models::make_dict;
using models::on_host;
using models::put;

/// A zip archive as torch.save writes it, with a checksum of the whole at its end.
std::string sealed_archive(const Dict& dict);

/// Writes the bytes of sealed_archive(), tensor by tensor, as base::write_file_atomically() does.
void write_sealed_archive(const Dict& dict, const std::filesystem::path& path);

bool is_sealed(std::string_view bytes);

/// Reads a file of weights or of a run, and logs its name.
std::string load_file(const std::filesystem::path& file);

/// For messages: what a file is that is no sealed archive.
std::string what_it_is(std::string_view bytes);

/// Whether the bytes are those of Python's torch.save or of safetensors.
bool is_of_python(std::string_view bytes);

}  // namespace syncbn::train
