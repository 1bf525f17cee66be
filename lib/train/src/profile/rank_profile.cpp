#include "profile/rank_profile.h"

#include <nlohmann/json.hpp>

namespace syncbn::train {

// nlohmann finds these conversions in the namespace of their arguments. Lists are shorter than
// objects.

using nlohmann::json;

void to_json(json& to, const Interval& from) {
  to = json::array({from.begin, from.end});
}
void from_json(const json& from, Interval& to) {
  to = {from.at(0), from.at(1)};
}

void to_json(json& to, const Exchange& from) {
  to =
      json::array({from.name, from.kind, from.group, from.sequence, from.time, json(from.blocked)});
}
void from_json(const json& from, Exchange& to) {
  to = {from.at(0), from.at(1), from.at(2), from.at(3), from.at(4), from.at(5)};
}

void to_json(json& to, const LayerTime& from) {
  to = json::array({from.name, from.calls, from.forward, from.backward, from.exchange});
}
void from_json(const json& from, LayerTime& to) {
  to = {from.at(0), from.at(1), from.at(2), from.at(3), from.at(4)};
}

void to_json(json& to, const Phase& from) {
  to = json::array({from.name, from.time});
}
void from_json(const json& from, Phase& to) {
  to = {from.at(0), from.at(1)};
}

std::string to_bytes(const RankProfile& profile) {
  const json all = {
      {"rank", profile.rank},    {"host", profile.host},     {"first_step", profile.first_step},
      {"steps", profile.steps},  {"phases", profile.phases}, {"exchanges", profile.exchanges},
      {"layers", profile.layers}};
  const std::vector<uint8_t> bytes = json::to_cbor(all);
  return {bytes.begin(), bytes.end()};
}

RankProfile rank_profile_of(const std::string& bytes) {
  const json all = json::from_cbor(bytes);
  RankProfile profile;
  all.at("rank").get_to(profile.rank);
  all.at("host").get_to(profile.host);
  all.at("first_step").get_to(profile.first_step);
  all.at("steps").get_to(profile.steps);
  all.at("phases").get_to(profile.phases);
  all.at("exchanges").get_to(profile.exchanges);
  all.at("layers").get_to(profile.layers);
  return profile;
}

}  // namespace syncbn::train
