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
std::string kind_in_torch(const RankRecord& record, const RankRecord::Call& call,
                          const RankRecord::Group& group) {
  if (call.is_collective()) return call.kind;
  const auto place = [&group](int rank) {
    return std::ranges::find(group.ranks, rank) - group.ranks.begin();
  };
  return fmt::format("{} {}{}{}", call.kind, place(record.rank), call.kind == "send" ? "->" : "<-",
                     place(call.peer));
}

RankRecord::Group group_of(const RankRecord& record, const RankRecord::Call& call) {
  const bool is_known = call.group < record.groups.size();
  return is_known ? record.groups[call.group] : RankRecord::Group{"?", {}};
}

Json json_of(const RankRecord& record, const RankRecord::Call& call) {
  return {
      {"record_id", call.number},
      {call.is_collective() ? "collective_seq_id" : "p2p_seq_id", call.sequence},
      {"process_group", {group_of(record, call).name, "undefined"}},
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
Json json_for_torch(const RankRecord& record, const RankRecord::Call& call) {
  const RankRecord::Group group = group_of(record, call);
  const auto [inputs, outputs] = inputs_and_outputs(call, group.ranks.size());
  return {{"pg_id", call.group},
          {call.is_collective() ? "p2p_seq_id" : "collective_seq_id", 0},
          {"op_id", call.number},
          {"profiling_name", "nccl:" + kind_in_torch(record, call, group)},
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
  Json json = json_of(record);
  Json groups = Json::object();
  for (size_t i = 0; i < record.groups.size(); ++i) {
    const RankRecord::Group& group = record.groups[i];
    Json& own = groups[group.name] = json["pg_config"][i];
    own["desc"] = "undefined";
    own["ranks"] = fmt::format("[{}]", fmt::join(group.ranks, ", "));
  }
  json.update({{"version", kTorchVersion}, {"pg_config", groups}, {"pg_status", Json::object()}});
  for (size_t i = 0; i < record.calls.size(); ++i) {
    json["entries"][i].update(json_for_torch(record, record.calls[i]));
  }
  return json;
}

// From a message, or a list as torch writes it.
std::vector<int> members_in(const Json& list, size_t max_count) {
  if (list.is_array()) return ranks_in(list.get<RankRuns>(), max_count);
  std::vector<int> ranks;
  for (const int rank : parse_json(list.get_ref<const std::string&>())) {
    if (ranks.size() == max_count) break;
    if (rank >= 0 && rank < kMaxRanks) ranks.push_back(rank);
  }
  return ranks;
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

void FlightFile::add(RankRecord record) {
  ranks.push_back(record.rank);
  records.push_back(std::move(record));
}

Json json_of(const RankRecord& record) {
  Json groups = Json::array();
  for (const RankRecord::Group& group : record.groups) {
    groups.push_back(
        {{"name", group.name}, {"last_collective", group.last}, {"ranks", rank_runs(group.ranks)}});
  }
  Json calls = Json::array();
  for (const RankRecord::Call& call : record.calls) calls.push_back(json_of(record, call));
  return {{"rank", record.rank}, {"world_size", record.world_size}, {"host", record.host},
          {"pid", record.pid},   {"pg_config", std::move(groups)},  {"entries", std::move(calls)}};
}

std::optional<RankRecord> record_in(const Json& json) {
  try {
    RankRecord record{.rank = json.at("rank"),
                      .world_size = json.at("world_size"),
                      .pid = json.at("pid"),
                      .host = shown_text(json, "host")};
    if (!record.has_valid_rank()) return std::nullopt;
    size_t room = RankRecord::kMaxRanksInGroups;
    for (const Json& group : json.at("pg_config")) {
      std::vector<int> ranks = members_in(group.at("ranks"), room);
      room -= ranks.size();
      record.groups.push_back(
          {shown_text(group, "name"), std::move(ranks), group.at("last_collective")});
    }
    for (const Json& call : json.at("entries")) record.calls.push_back(call_in(call, record));
    return record;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::string FlightFile::text() const {
  FlightText text;
  for (const RankRecord& record : records) text.add(record);
  return text.text(*this);
}

void FlightText::add(const RankRecord& record) {
  const std::string line = json_line(json_for_torch(record)) + "\n";
  if (line.size() > kMaxLine || lines_.size() + line.size() > kMaxText) {
    left_out_.push_back(record.rank);
    return;
  }
  ranks_.push_back(record.rank);
  lines_ += line;
}

std::string FlightText::text(const FlightFile& head) const {
  Json first = head;
  first.update({{"format", kFormat}, {"ranks", ranks_}});
  if (!left_out_.empty()) {
    first["missing"].push_back(FlightFile::Missing{"all nodes", left_out_, "the file is full"});
  }
  return fmt::format("{}\n{}{}\n", json_line(first), lines_, json_line(Json{{"complete", true}}));
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
    for (const char* key : {"job", "attempt", "world_size", "why", "unix_ns", "ranks"})
      head.at(key);
    if (head.at("format") != kFormat || file.world_size > kMaxRanks) throw base::UserError("");
  } catch (const std::exception&) {
    refuse(", or its first line is damaged");
  }
  file.is_complete = false;
  for (size_t number = 2; std::getline(lines, line); ++number) {
    if (line.size() > kMaxLine) {
      refuse(fmt::format(": line {} has {} bytes; the record of a rank has at most {}", number,
                         line.size(), kMaxLine));
    }
    const Json json = parse_json(line);
    const auto count = [&json](const char* key) {
      return json.is_object() && json.contains(key) ? json.at(key).size() : 0;
    };
    if (count("entries") > base::FlightLayout::kCalls ||
        count("pg_config") > base::FlightLayout::kGroups) {
      refuse(fmt::format(
          ": line {} has {} calls in {} groups; the record of a rank has at most {} in {}", number,
          count("entries"), count("pg_config"), base::FlightLayout::kCalls,
          base::FlightLayout::kGroups));
    }
    file.is_complete = json.contains("complete");
    if (file.is_complete) continue;
    if (auto record = record_in(json)) {
      file.records.push_back(*std::move(record));
    } else {
      ++file.damaged_lines;
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

std::optional<Json> record_message(RankRecord record, const RecordQuota& quota) {
  constexpr size_t kFrame = 100;  // bytes that a sender adds
  for (size_t count = std::min(quota.calls, record.calls.size()); count > 0;
       count = count * 3 / 4) {
    keep_calls(record.calls, count);
    Json message = json_of(record);
    message["type"] = "record";
    if (json_line(message).size() + kFrame <= quota.bytes) return message;
  }
  return std::nullopt;
}

std::string JobRecords::text() const {
  FlightFile head = file;
  head.unix_ns = base::unix_ns();
  FlightText lines;
  for (const auto& [rank, message] : messages) {
    const auto record = record_in(parse_json(message));
    if (record && record->rank == rank) {
      lines.add(*record);
    } else {
      head.missing.push_back({fmt::format("rank {}", rank), {rank}, "its record is damaged"});
    }
  }
  return lines.text(head);
}

}  // namespace syncbn::launch
