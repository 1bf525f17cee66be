#include "job/rank_record.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/text.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

namespace syncbn::launch {
namespace {

using base::FlightLayout;

template <size_t size>
std::string text_in(const char (&bytes)[size]) {
  return base::printable({bytes, ::strnlen(bytes, size)});
}

// "0,1,3 name"
RankRecord::Group group_in(std::string_view line) {
  std::vector<int> ranks;
  const size_t blank = std::min(line.find(' '), line.size());
  for (const std::string& word : base::words_of(line.substr(0, blank))) {
    const auto rank = base::parse_number<int>(word);
    if (rank && *rank >= 0 && *rank < kMaxRanks) ranks.push_back(*rank);
  }
  return {base::printable(line.substr(std::min(blank + 1, line.size()))), rank_runs(ranks)};
}

std::vector<RankRecord::Group> groups_in(std::string_view text) {
  std::vector<RankRecord::Group> groups;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    groups.push_back(group_in(text.substr(begin, end - begin)));
  }
  return groups;
}

RankRecord::Call call_in(const FlightLayout::Call& entry) {
  return {.number = entry.number,
          .sequence = entry.sequence,
          .begin = entry.begin,
          .end = entry.end,
          .awaited = entry.awaited,
          .sizes = {entry.sizes,
                    entry.sizes + std::min<size_t>(entry.dimensions, std::size(entry.sizes))},
          .peer = entry.peer,
          .group = entry.group,
          .state = static_cast<FlightLayout::State>(
              std::min<uint8_t>(entry.state, FlightLayout::kFailed)),
          .kind = text_in(entry.kind),
          .dtype = text_in(entry.dtype),
          .name = text_in(entry.name)};
}

}  // namespace

RankRuns rank_runs(const std::vector<int>& ranks) {
  RankRuns runs;
  for (size_t first = 0, end; first < ranks.size(); first = end) {
    end = first + 1;
    const int step = end < ranks.size() ? ranks[end] - ranks[first] : 1;
    while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
    runs.push_back({ranks[first], static_cast<int>(end - first), step});
  }
  return runs;
}

bool contains(const RankRuns& runs, int rank) {
  return std::ranges::any_of(runs, [rank](const auto& run) {
    const auto [first, count, step] = run;
    const int64_t ahead = int64_t{rank} - first;
    if (step == 0) return ahead == 0 && count > 0;
    return ahead % step == 0 && ahead / step >= 0 && ahead / step < count;
  });
}

std::vector<int> ranks_in(const RankRuns& runs, size_t max_count) {
  std::vector<int> ranks;
  for (const auto& [first, count, step] : runs) {
    int64_t rank = first;
    for (int i = 0; i < count && rank >= 0 && rank < kMaxRanks; ++i, rank += step) {
      if (ranks.size() == max_count) return ranks;
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

std::string RankRecord::Call::describe() const {
  std::string text = name;
  if (!dtype.empty()) text += " of " + dtype;
  if (!sizes.empty()) text += fmt::format(" [{}]", fmt::join(sizes, ", "));
  return text;
}

std::string RankRecord::name_of(const Call& call) const {
  return fmt::format("{} #{} of group '{}'", call.name, call.sequence,
                     call.group < groups.size() ? groups[call.group].name : "?");
}

size_t RankRecord::bytes() const {
  size_t bytes = groups.size() * sizeof(Group) + calls.size() * sizeof(Call);
  for (const Group& one : groups) bytes += one.name.size() + one.ranks.size() * 12;
  for (const Call& one : calls) {
    bytes += one.kind.size() + one.dtype.size() + one.name.size() + one.sizes.size() * 8;
  }
  return bytes;
}

std::optional<RankRecord> read_rank_record(int fd) {
  const auto layout = std::make_unique<FlightLayout>();
  const auto size = static_cast<ssize_t>(sizeof(FlightLayout));
  if (::pread(fd, layout.get(), sizeof(FlightLayout), 0) != size) return std::nullopt;
  const FlightLayout::Header& header = layout->header;
  if (header.magic != FlightLayout::kMagic || header.version != FlightLayout::kVersion) return {};
  RankRecord record{.rank = header.rank,
                    .world_size = header.world_size,
                    .pid = header.pid,
                    .host = text_in(header.host),
                    .unix_ns = header.unix_ns};
  if (record.pid == 0 || !record.has_valid_rank()) return std::nullopt;
  record.groups =
      groups_in({layout->groups, std::min<size_t>(header.group_bytes, FlightLayout::kGroupBytes)});
  record.groups.resize(std::min(record.groups.size(), FlightLayout::kGroups));
  for (size_t i = 0; i < record.groups.size(); ++i) {
    record.groups[i].last = layout->last_collectives[i];
  }
  // An entry whose number has changed meanwhile may have been half written.
  const auto again = std::make_unique<FlightLayout>();
  if (::pread(fd, again.get(), sizeof(FlightLayout), 0) != size) return std::nullopt;
  for (size_t i = 0; i < FlightLayout::kCalls; ++i) {
    const FlightLayout::Call& entry = layout->calls[i];
    if (entry.number != 0 && entry.number == again->calls[i].number) {
      record.calls.push_back(call_in(entry));
    }
  }
  std::ranges::sort(record.calls, {}, &RankRecord::Call::number);
  return record;
}

RankMemory RankMemory::make() {
  RankMemory memory;
  // A file above the limit would end this process by SIGXFSZ.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < sizeof(FlightLayout)) return {};
  memory.fd_.reset(::memfd_create(kName, MFD_CLOEXEC));
  return base::FlightRecord::prepare(memory.fd()) ? std::move(memory) : RankMemory();
}

std::optional<RankMemory::Counts> RankMemory::counts() const {
  FlightLayout::Header header;
  if (!base::FlightRecord::is_taken(fd())) return std::nullopt;
  if (::pread(fd(), &header, sizeof(header), 0) != sizeof(header) || header.pid == 0) {
    return std::nullopt;
  }
  const int64_t own = header.own_until(base::monotonic_ns());
  return Counts{header.started, header.ended, static_cast<double>(own) / 1e9, text_in(header.gpu)};
}

}  // namespace syncbn::launch
