#include "rendezvous/place.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace syncbn::dist::detail {
namespace {

using base::UserError;

int required(const std::optional<int>& given, const char* name, int64_t min, int64_t max,
             const std::string& source) {
  if (given) {
    if (*given < min || *given > max) {
      throw UserError(fmt::format("{} must be from {} to {}, got {}", name, min, max, *given));
    }
    return *given;
  }
  if (const auto value = base::env_int(name, min, max)) return static_cast<int>(*value);
  throw UserError(
      fmt::format("{} needs {}, which is not set; start the program with syncbn-launch, which sets "
                  "it, or give it in InitOptions",
                  source, name));
}

}  // namespace

Place Place::find(const InitOptions& options) {
  constexpr int64_t kMaxRanks = 1 << 20;
  Place place;
  const std::string source = fmt::format("init_method '{}'", options.init_method);
  if (options.init_method.starts_with("tcp://")) {
    place.master = StoreEndpoint::parse(options.init_method);
  } else if (options.init_method.starts_with("file://")) {
    place.file = options.init_method.substr(std::string_view("file://").size());
    if (!place.file.starts_with('/') || place.file.ends_with('/')) {
      throw UserError(fmt::format("{} is not file:///path", source));
    }
  } else if (options.init_method != "env://") {
    throw UserError(
        fmt::format("{} is not known; it is env://, tcp://host:port or file:///path", source));
  } else if (!options.rank && !options.world_size && !base::env("RANK") &&
             !base::env("WORLD_SIZE")) {
    return place;  // no launcher: a world of one rank
  }
  place.world_size = required(options.world_size, "WORLD_SIZE", 1, kMaxRanks, source);
  place.rank = required(options.rank, "RANK", 0, kMaxRanks, source);
  if (place.rank >= place.world_size) {
    throw UserError(
        fmt::format("RANK={} is not below WORLD_SIZE={}", place.rank, place.world_size));
  }
  if (place.world_size > 1 && place.master.port == 0 && place.file.empty()) {
    const auto host = base::env("MASTER_ADDR");
    const auto port = base::env_int("MASTER_PORT", 1, 65535);
    if (!host || !port) {
      throw UserError(fmt::format(
          "WORLD_SIZE={} needs MASTER_ADDR and MASTER_PORT, and {} is not set; start the program "
          "with syncbn-launch, which sets them",
          place.world_size, host ? "MASTER_PORT" : "MASTER_ADDR"));
    }
    place.master = {*host, static_cast<uint16_t>(*port)};
    const auto agent = base::env("TORCHELASTIC_USE_AGENT_STORE");
    place.agent_holds_store = agent && *agent == "True";
  }
  return place;
}

std::string Place::how_to_part() const {
  if (file.empty()) return "give each job a MASTER_PORT of its own";
  return fmt::format("give each job a file of its own, and delete '{}' if an earlier job left it",
                     file);
}

bool Place::on_several_hosts() const {
  const auto local = base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20);
  return local && *local < world_size;
}

}  // namespace syncbn::dist::detail
