#include "profile/rank_profile.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::train {

ExchangeTime exchange_time(Intervals exchanges, Intervals blocked) {
  exchanges = united(std::move(exchanges));
  return {length_of(exchanges), length_of(common(exchanges, united(std::move(blocked))))};
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LayerTime, name, forward, backward, exchange)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ExchangeTime, total, exposed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankProfile, first_step, steps, step_time, layers, gradients,
                                   statistics, failure)

std::string to_bytes(const RankProfile& profile) {
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(profile);
  return {bytes.begin(), bytes.end()};
}

RankProfile rank_profile_of(const std::string& bytes) {
  return nlohmann::json::from_cbor(bytes).get<RankProfile>();
}

}  // namespace syncbn::train
