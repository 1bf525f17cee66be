#pragma once

#include <string_view>

#include "weights/mapped_file.h"
#include "weights/pickle.h"

namespace syncbn::models::detail {

/// Whether a file begins like one from torch.save, in the zip format or the format before
/// torch 1.6.
bool is_torch_file(std::string_view bytes);

/// The saved value. Tensors share the file's memory.
/// @param values owns the result
/// @throws base::UserError saying what is wrong with the file.
const Value& read_torch_file(const MappedFile& file, Values& values);

}  // namespace syncbn::models::detail
