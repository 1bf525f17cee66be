#include <syncbn/base/env.h>
#include <syncbn/base/machine_id.h>

#include <fstream>

namespace syncbn::base {

std::string machine_id(const std::string& file) {
  std::string boot;
  std::ifstream(file) >> boot;
  return boot.empty() ? hostname() : boot;
}

}  // namespace syncbn::base
