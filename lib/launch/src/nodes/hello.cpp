#include "nodes/hello.h"

#include <nlohmann/json.hpp>

namespace syncbn::launch {

nlohmann::json Hello::json() const {
  return {{"type", "hello"}, {"job", job},
          {"node", node},    {"leads", leads},
          {"nodes", nodes},  {"nproc", nproc},
          {"role", role},    {"host", host},
          {"auth", ""},      {"max_restarts", max_restarts}};
}

Hello Hello::of(const nlohmann::json& message) {
  return {message.at("job"),   message.at("node"), message.at("leads"), message.at("nodes"),
          message.at("nproc"), message.at("role"), message.at("host"),  message.at("max_restarts")};
}

}  // namespace syncbn::launch
