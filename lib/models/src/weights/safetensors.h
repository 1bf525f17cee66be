#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include <syncbn/models/weights.h>

#include "weights/mapped_file.h"

namespace syncbn::models::detail {

/// Reads a file in Hugging Face's safetensors format. Tensors share the file's memory.
/// @throws base::UserError saying what is wrong with the file.
StateDict read_safetensors(const MappedFile& file);

/// Writes tensors in this format.
/// @param metadata strings for the header, in addition to the format's own
void write_safetensors(const StateDict& tensors, const std::function<void(std::string_view)>& sink,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace syncbn::models::detail
