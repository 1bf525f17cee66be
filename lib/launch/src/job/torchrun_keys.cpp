#include "job/torchrun_keys.h"

#include <nlohmann/json.hpp>

namespace syncbn::launch {

std::string TorchrunRole::str() const {
  return nlohmann::json{{"role", role}, {"rank", node}, {"local_world_size", nproc}}.dump();
}

std::optional<TorchrunRole> TorchrunRole::parse(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  try {
    return TorchrunRole{json.at("role"), json.at("rank"), json.at("local_world_size")};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace syncbn::launch
