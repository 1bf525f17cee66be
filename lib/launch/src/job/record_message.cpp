#include "job/record_message.h"

#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using base::FlightLayout;
using Json = nlohmann::json;

constexpr size_t kMaxMessageBytes = size_t{256} << 10;
constexpr size_t kNumbersOfCall = 10;  // before its sizes

/// The calls that have not succeeded, then the latest, `count` in all; sorted by number.
std::vector<const RankRecord::Call*> chosen_calls(const RankRecord& record, size_t count) {
  std::vector<const RankRecord::Call*> calls;
  calls.reserve(record.calls.size());
  for (const RankRecord::Call& call : record.calls) calls.push_back(&call);
  std::stable_partition(calls.begin(), calls.end(), [](const RankRecord::Call* call) {
    return call->state == FlightLayout::kSucceeded;
  });
  calls.erase(calls.begin(), calls.end() - static_cast<std::ptrdiff_t>(count));
  std::ranges::sort(calls, {}, &RankRecord::Call::number);
  return calls;
}

/// The message with `count` calls.
Json message_with(const RankRecord& record, size_t count) {
  Json groups = Json::array();
  for (const RankRecord::Group& group : record.groups) {
    groups.push_back({group.name, group.last, runs_of(group.ranks)});
  }
  std::map<std::string, size_t> places;
  Json texts = Json::array();
  const auto place_of = [&](const std::string& text) {
    const auto [found, is_new] = places.emplace(text, places.size());
    if (is_new) texts.push_back(text);
    return found->second;
  };
  Json calls = Json::array();
  for (const RankRecord::Call* call : chosen_calls(record, count)) {
    Json numbers{call->number,        call->sequence,       call->begin,
                 call->end,           call->peer,           call->group,
                 call->state,         place_of(call->kind), place_of(call->dtype),
                 place_of(call->name)};
    for (const int64_t size : call->sizes) numbers.push_back(size);
    calls.push_back(std::move(numbers));
  }
  return {{"type", "record"},    {"rank", record.rank},       {"world_size", record.world_size},
          {"host", record.host}, {"pid", record.pid},         {"unix_ns", record.unix_ns},
          {"groups", groups},    {"texts", std::move(texts)}, {"calls", std::move(calls)}};
}

RankRecord::Call call_in_message(const Json& numbers, const std::vector<std::string>& texts) {
  const auto text = [&](size_t i) { return texts.at(numbers.at(i).get<size_t>()); };
  RankRecord::Call call{.number = numbers.at(0),
                        .sequence = numbers.at(1),
                        .begin = numbers.at(2),
                        .end = numbers.at(3),
                        .peer = numbers.at(4),
                        .group = numbers.at(5),
                        .state = static_cast<FlightLayout::State>(std::min<unsigned>(
                            numbers.at(6).get<unsigned>(), FlightLayout::kFailed)),
                        .kind = text(7),
                        .dtype = text(8),
                        .name = text(9)};
  const size_t sizes =
      std::min(numbers.size(), kNumbersOfCall + std::size(FlightLayout::Call{}.sizes));
  for (size_t i = kNumbersOfCall; i < sizes; ++i) call.sizes.push_back(numbers.at(i));
  return call;
}

}  // namespace

RecordQuota RecordQuota::of(int world_size) {
  constexpr size_t kMaxCalls = 100'000;
  constexpr size_t kMinCalls = 10;
  constexpr size_t kMaxBytes = size_t{64} << 20;
  const auto ranks = static_cast<size_t>(std::max(world_size, 1));
  return {.calls = std::clamp(kMaxCalls / ranks, kMinCalls, FlightLayout::kCalls),
          .bytes = std::min(kMaxBytes / ranks, kMaxMessageBytes)};
}

std::optional<Json> record_message(const RankRecord& record, const RecordQuota& quota) {
  constexpr size_t kFrame = 100;  // bytes that a sender adds
  for (size_t count = std::min(quota.calls, record.calls.size()); count > 0;
       count = count * 3 / 4) {
    Json message = message_with(record, count);
    if (json_line(message).size() + kFrame <= quota.bytes) return message;
  }
  return std::nullopt;
}

std::optional<RankRecord> record_in(const Json& message) {
  try {
    RankRecord record{.rank = message.at("rank"),
                      .world_size = message.at("world_size"),
                      .pid = message.at("pid"),
                      .host = shown_text(message, "host"),
                      .unix_ns = message.at("unix_ns")};
    if (!record.has_valid_rank()) return std::nullopt;
    size_t room = RankRecord::kMaxRanksInGroups;
    for (const Json& group : message.at("groups")) {
      std::vector<int> ranks = ranks_in_runs(group.at(2), room);
      room -= ranks.size();
      record.groups.push_back(
          {base::printable(group.at(0).get<std::string>()), std::move(ranks), group.at(1)});
    }
    std::vector<std::string> texts = message.at("texts");
    for (std::string& text : texts) text = base::printable(text);
    for (const Json& numbers : message.at("calls")) {
      record.calls.push_back(call_in_message(numbers, texts));
    }
    return record;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

Json JobRecords::head() const {
  return {{"type", "all_records"},         {"job", file.job}, {"attempt", file.attempt},
          {"world_size", file.world_size}, {"why", file.why}, {"missing", file.missing}};
}

JobRecords JobRecords::of(const Json& head) {
  return {.file = {.job = shown_text(head, "job"),
                   .attempt = head.at("attempt"),
                   .world_size = head.at("world_size"),
                   .why = shown_text(head, "why"),
                   .has_all_nodes = true,
                   .missing = missing_in(head.at("missing"))}};
}

std::string JobRecords::text() const {
  FlightFile head = file;
  head.unix_ns = base::unix_ns();
  FlightText lines;
  for (const auto& [rank, message] : messages) {
    if (const auto record = record_in(parse_json(message))) lines.add(*record);
  }
  return lines.text(head);
}

}  // namespace syncbn::launch
