#pragma once

#include <functional>
#include <string>
#include <string_view>

#include <syncbn/models/weights.h>

#include "weights/mapped_file.h"

namespace syncbn::models::detail {

/// Reads a file in Hugging Face's safetensors format. Tensors share the file's memory.
/// @throws base::UserError with what is wrong with the file.
StateDict read_safetensors(const MappedFile& file);

/// Writes tensors in this format.
void write_safetensors(const StateDict& tensors, const std::function<void(std::string_view)>& sink);

}  // namespace syncbn::models::detail
