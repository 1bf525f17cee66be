#pragma once

#include <filesystem>

namespace syncbn::base {

/// The file of the program that the user started. For libexec/syncbn/NAME_program that is bin/NAME,
/// which execs it (apps/train/front.cpp). Empty if /proc is not mounted.
std::filesystem::path program_file();

}  // namespace syncbn::base
