#pragma once

#include <functional>
#include <string>
#include <vector>

#include <syncbn/config/value.h>

namespace syncbn::train {

/// A plug-in that this process has loaded.
struct Plugin {
  std::string file;  ///< "libmine.so"
  std::string sha256;
};

const std::vector<Plugin>& loaded_plugins();

/// Runs a function that registers networks, data sets, and so on.
/// @param origin the plug-in that registers; empty: the program itself
/// @throws base::UserError that names the origin, for all exceptions of the function
void register_from(const std::string& origin, const std::function<void()>& register_all);

/// Loads the plug-ins that the key `plugins` lists. They stay loaded.
/// @param wanted the key's value; reading the configuration reports what is not a list of texts
/// @throws base::UserError for a file that is missing, no plug-in, or was built for another syncbn,
///   libtorch or C++ library, and as register_from() does
void load_plugins(const config::Value& wanted);

}  // namespace syncbn::train
