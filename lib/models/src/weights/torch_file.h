#pragma once

#include <memory>
#include <string_view>

#include "weights/mapped_file.h"
#include "weights/pickle.h"

namespace syncbn::models::detail {

/// Whether a file begins as one that torch.save has written, in its zip format or the one before
/// torch 1.6.
bool is_torch_file(std::string_view bytes);

/// What was saved. Tensors share the file's memory.
/// @param values keeps it
/// @throws base::UserError with what is wrong with the file.
const Value& read_torch_file(const MappedFile& file, Values& values);

}  // namespace syncbn::models::detail
