#include "profile/rank_profile.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::train {

ExchangeTime exchange_time(Intervals exchanges, Intervals blocked) {
  exchanges = united(std::move(exchanges));
  return {length_of(exchanges), length_of(common(exchanges, united(std::move(blocked))))};
}

// nlohmann finds these conversions in the namespace of their arguments. Lists are shorter than
// objects.

using nlohmann::json;

void to_json(json& to, const LayerTime& from) {
  to = json::array({from.name, from.forward, from.backward, from.exchange});
}
void from_json(const json& from, LayerTime& to) {
  to = {from.at(0), from.at(1), from.at(2), from.at(3)};
}

void to_json(json& to, const ExchangeTime& from) {
  to = json::array({from.total, from.exposed});
}
void from_json(const json& from, ExchangeTime& to) {
  to = {from.at(0), from.at(1)};
}

std::string to_bytes(const RankProfile& profile) {
  const json all =
      json::array({profile.first_step, profile.steps, profile.step_time, profile.layers,
                   profile.gradients, profile.statistics, profile.failure});
  const std::vector<uint8_t> bytes = json::to_cbor(all);
  return {bytes.begin(), bytes.end()};
}

RankProfile rank_profile_of(const std::string& bytes) {
  const json all = json::from_cbor(bytes);
  return {all.at(0), all.at(1), all.at(2), all.at(3), all.at(4), all.at(5), all.at(6)};
}

}  // namespace syncbn::train
