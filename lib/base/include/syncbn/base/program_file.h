#pragma once

#include <filesystem>

namespace syncbn::base {

/// The file of the program that was started. Of libexec/syncbn/NAME_program that is bin/NAME, which
/// becomes the other (apps/train/front.cpp). Empty where /proc is not mounted.
std::filesystem::path program_file();

}  // namespace syncbn::base
