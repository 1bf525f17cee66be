#include "job/flight_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "syncbn flight record 2";
// The version of torch's format: c10d::version_val in FlightRecorder.hpp.
constexpr const char* kTorchVersion = "2.10";
// Upper bound on the lines of all ranks: writing this much takes a second or two.
constexpr size_t kMaxText = size_t{128} << 20;
// Upper bound on a line. A rank's thousand calls take one or two MiB.
constexpr size_t kMaxLine = size_t{4} << 20;
// Upper bound on a record as a message.
constexpr size_t kMaxMessageBytes = size_t{512} << 10;

/// The sizes with `times` as many rows: torch records one tensor for all ranks' inputs or outputs.
std::vector<int64_t> with_rows(std::vector<int64_t> sizes, int64_t times) {
  if (sizes.empty()) return {times};
  if (__builtin_mul_overflow(sizes[0], times, &sizes[0])) sizes[0] = 0;  // the record is damaged
  return sizes;
}

/// The sizes of a call's inputs and outputs; `call.sizes` are those of this rank's tensor.
std::pair<std::vector<int64_t>, std::vector<int64_t>> inputs_and_outputs(
    const RankRecord::Call& call, size_t ranks) {
  const auto times = static_cast<int64_t>(ranks);
  if (call.sizes.empty()) return {};
  if (call.kind == "_reduce_scatter_base") {
    std::vector<int64_t> part = call.sizes;
    part[0] /= std::max<int64_t>(times, 1);
    return {call.sizes, part};
  }
  if (call.kind == "reduce_scatter" || call.kind == "scatter") {
    return {with_rows(call.sizes, times), call.sizes};
  }
  const bool gathers = call.kind.find("gather") != std::string::npos ||
                       call.kind.find("GATHER") != std::string::npos;
  return {call.sizes, gathers ? with_rows(call.sizes, times) : call.sizes};
}

/// "send 0->1": ranks of the group.
std::string kind_in_torch(int rank, const RankRecord::Call& call, const std::vector<int>& group) {
  if (call.is_collective()) return call.kind;
  const auto place = [&group](int one) { return std::ranges::find(group, one) - group.begin(); };
  return fmt::format("{} {}{}{}", call.kind, place(rank), call.kind == "send" ? "->" : "<-",
                     place(call.peer));
}

Json json_of(const RankRecord& record, const RankRecord::Call& call) {
  return {
      {"record_id", call.number},
      {call.is_collective() ? "collective_seq_id" : "p2p_seq_id", call.sequence},
      {"process_group",
       {call.group < record.groups.size() ? record.groups[call.group].name : "?", "undefined"}},
      {"time_created_ns", record.unix_time(call.begin)},
      {"time_discovered_completed_ns", call.end == 0 ? Json() : Json(record.unix_time(call.end))},
      {"input_dtypes", {call.dtype}},
      {"name", call.name},
      {"kind", call.kind},
      {"sizes", call.sizes},
      {"peer", call.peer},
      {"failed", call.state == base::FlightLayout::kFailed}};
}

/// What torch's tools read of a call besides json_of().
/// @param group the ranks of the call's group.
Json json_for_torch(const RankRecord& record, const RankRecord::Call& call,
                    const std::vector<int>& group) {
  const auto [inputs, outputs] = inputs_and_outputs(call, group.size());
  return {{"pg_id", call.group},
          {call.is_collective() ? "p2p_seq_id" : "collective_seq_id", 0},
          {"op_id", call.number},
          {"profiling_name", "nccl:" + kind_in_torch(record.rank, call, group)},
          {"input_sizes", Json::array({inputs})},
          {"output_sizes", Json::array({outputs})},
          {"output_dtypes", {call.dtype}},
          {"state", call.state == base::FlightLayout::kSucceeded ? "completed" : "started"},
          {"time_discovered_started_ns", record.unix_time(call.begin)},
          {"retired", call.end != 0},
          {"timeout_ms", 0},
          {"is_p2p", !call.is_collective()},
          // fr_trace prints this in place of the Python stack of torch's records.
          {"frames", {{{"name", call.name}, {"filename", "syncbn"}, {"line", 0}}}}};
}

/// A rank's line.
Json json_for_torch(const RankRecord& record) {
  Json json = record;
  Json groups = Json::object();
  std::vector<std::vector<int>> members;
  size_t room = RankRecord::kMaxRanksInGroups;
  for (size_t i = 0; i < record.groups.size(); ++i) {
    room -= members.emplace_back(ranks_in(record.groups[i].ranks, room)).size();
    Json& own = groups[record.groups[i].name] = json["pg_config"][i];
    own["desc"] = "undefined";
    own["ranks"] = fmt::format("[{}]", fmt::join(members.back(), ", "));
  }
  members.emplace_back();  // of an unknown group
  json.update({{"version", kTorchVersion}, {"pg_config", groups}, {"pg_status", Json::object()}});
  for (size_t i = 0; i < record.calls.size(); ++i) {
    const RankRecord::Call& call = record.calls[i];
    json["entries"][i].update(
        json_for_torch(record, call, members[std::min(call.group, record.groups.size())]));
  }
  return json;
}

// From a message, or a list as torch writes it.
RankRuns members_in(const Json& list) {
  if (list.is_array()) return list;
  auto ranks = parse_json(list.get_ref<const std::string&>()).get<std::vector<int>>();
  std::erase_if(ranks, [](int rank) { return rank < 0 || rank >= kMaxRanks; });
  return rank_runs(ranks);
}

RankRecord::Call call_in(const Json& json, const RankRecord& record) {
  const auto group = json.at("process_group").at(0).get<ShownText>();
  const auto found = std::ranges::find(record.groups, group, &RankRecord::Group::name);
  const Json& end = json.at("time_discovered_completed_ns");
  const bool failed = json.at("failed");
  RankRecord::Call call{.number = json.at("record_id"),
                        .sequence = 0,
                        .begin = json.at("time_created_ns"),
                        .end = end.is_null() ? 0 : end.get<uint64_t>(),
                        .sizes = json.at("sizes"),
                        .peer = json.at("peer"),
                        .group = static_cast<size_t>(found - record.groups.begin()),
                        .state = failed          ? base::FlightLayout::kFailed
                                 : end.is_null() ? base::FlightLayout::kPending
                                                 : base::FlightLayout::kSucceeded,
                        .kind = shown_text(json, "kind"),
                        .dtype = base::printable(json.at("input_dtypes").at(0).get<std::string>()),
                        .name = shown_text(json, "name")};
  call.sequence = json.at(call.is_collective() ? "collective_seq_id" : "p2p_seq_id");
  return call;
}

/// Keeps the calls that have not succeeded, then the latest, `count` in all; sorted by number.
void keep_calls(std::vector<RankRecord::Call>& calls, size_t count) {
  std::stable_partition(calls.begin(), calls.end(), [](const RankRecord::Call& call) {
    return call.state == base::FlightLayout::kSucceeded;
  });
  calls.erase(calls.begin(), calls.end() - static_cast<std::ptrdiff_t>(count));
  std::ranges::sort(calls, {}, &RankRecord::Call::number);
}

// Python's pickle, protocol 2: an opcode, then its argument.

template <class Number>
void put_number(std::string& to, Number number) {
  for (size_t i = 0; i < sizeof(number); ++i) to += static_cast<char>(number >> (8 * i));
}

void put_text(std::string& to, const std::string& text) {
  to += 'X';
  put_number(to, static_cast<uint32_t>(text.size()));
  to += text;
}

void put(std::string& to, const Json& json) {
  if (json.is_object()) {
    to += "}(";
    for (const auto& [key, value] : json.items()) {
      put_text(to, key);
      put(to, value);
    }
    to += 'u';
  } else if (json.is_array()) {
    to += "](";
    for (const Json& value : json) put(to, value);
    to += 'e';
  } else if (json.is_string()) {
    put_text(to, json.get<std::string>());
  } else if (json.is_boolean()) {
    to += json.get<bool>() ? '\x88' : '\x89';
  } else if (json.is_null()) {
    to += 'N';
  } else {
    to += "\x8a\x08";  // an integer of 8 bytes
    put_number(to, json.get<uint64_t>());
  }
}

}  // namespace

void to_json(Json& json, const RankRecord& record) {
  Json groups = Json::array();
  for (const RankRecord::Group& group : record.groups) {
    groups.push_back(
        {{"name", group.name}, {"last_collective", group.last}, {"ranks", group.ranks}});
  }
  Json calls = Json::array();
  for (const RankRecord::Call& call : record.calls) calls.push_back(json_of(record, call));
  json = {{"rank", record.rank}, {"world_size", record.world_size}, {"host", record.host},
          {"pid", record.pid},   {"pg_config", std::move(groups)},  {"entries", std::move(calls)}};
}

void from_json(const Json& json, RankRecord& record) {
  record = {.rank = json.at("rank"),
            .world_size = json.at("world_size"),
            .pid = json.at("pid"),
            .host = shown_text(json, "host")};
  const Json& groups = json.at("pg_config");
  const Json& calls = json.at("entries");
  using base::FlightLayout;
  if (!record.has_valid_rank() || groups.size() > FlightLayout::kGroups ||
      calls.size() > FlightLayout::kCalls) {
    Json::array().at(0);  // throws
  }
  for (const Json& group : groups) {
    record.groups.push_back(
        {shown_text(group, "name"), members_in(group.at("ranks")), group.at("last_collective")});
  }
  for (const Json& call : calls) record.calls.push_back(call_in(call, record));
}

std::string FlightFile::text() const {
  std::vector<int> has;
  std::vector<int> left_out;
  std::string lines;
  for (const auto& [rank, record] : records) {
    const std::string line = json_line(json_for_torch(record)) + "\n";
    const bool fits = line.size() <= kMaxLine && lines.size() + line.size() <= kMaxText;
    (fits ? has : left_out).push_back(rank);
    if (fits) lines += line;
  }
  Json first = *this;
  first.update({{"format", kFormat}, {"ranks", has}});
  if (!left_out.empty()) {
    first["missing"].push_back(Missing{"all nodes", left_out, "the file is full"});
  }
  return fmt::format("{}\n{}{}\n", json_line(first), lines, json_line(Json{{"complete", true}}));
}

FlightFile FlightFile::of(const std::string& text, const std::string& path) {
  const auto refuse = [&path](const std::string& why) {
    throw base::UserError(fmt::format("{} is no flight record of syncbn-launch{}", path, why));
  };
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  FlightFile file;
  try {
    const Json head = parse_json(line);
    head.get_to(file);
    if (head.at("format") != kFormat || file.world_size > kMaxRanks) throw base::UserError("");
  } catch (const std::exception&) {
    refuse(", or its first line is damaged");
  }
  for (size_t number = 2; std::getline(lines, line); ++number) {
    if (line.size() > kMaxLine) {
      refuse(fmt::format(": line {} has {} bytes; the record of a rank has at most {}", number,
                         line.size(), kMaxLine));
    }
    try {
      const RankRecord record = parse_json(line);
      file.records.emplace(record.rank, record);
    } catch (const Json::exception&) {  // damaged, or the last line
    }
  }
  return file;
}

std::string torch_pickle(const RankRecord& record) {
  std::string bytes = "\x80\x02";
  put(bytes, json_for_torch(record));
  return bytes + '.';
}

RecordQuota RecordQuota::of(int world_size) {
  constexpr size_t kMaxCalls = 80'000;
  constexpr size_t kMinCalls = 10;
  constexpr size_t kMaxBytes = size_t{64} << 20;
  const auto ranks = static_cast<size_t>(std::max(world_size, 1));
  return {.calls = std::clamp(kMaxCalls / ranks, kMinCalls, base::FlightLayout::kCalls),
          .bytes = std::min(kMaxBytes / ranks, kMaxMessageBytes)};
}

bool shorten(RankRecord& record, const RecordQuota& quota) {
  constexpr size_t kFrame = 100;  // bytes of the rest of the message
  for (size_t count = std::min(quota.calls, record.calls.size()); count > 0;
       count = count * 3 / 4) {
    keep_calls(record.calls, count);
    if (json_line(Json(record)).size() + kFrame <= quota.bytes) return true;
  }
  return false;
}

}  // namespace syncbn::launch
