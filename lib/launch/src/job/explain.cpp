#include "job/explain.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "common/processes.h"
#include "common/text_table.h"
#include "common/words.h"
#include "job/status_socket.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

// Upper bounds on what is printed about one job.
constexpr size_t kMaxCollectives = 100;
constexpr size_t kMaxNamed = 20;  // ranks, each with its last call

/// "rank 3", "ranks 0 to 3 and 7".
std::string list_of(const std::set<int>& ranks) {
  std::vector<std::string> parts = runs_in(ranks, " to ");
  const std::string tail = parts.size() > 1 ? " and " + parts.back() : "";
  if (parts.size() > 1) parts.pop_back();
  return (ranks.size() == 1 ? "rank " : "ranks ") + base::join(parts, ", ") + tail;
}

const char* verb(const std::set<int>& ranks, const char* singular, const char* plural) {
  return ranks.size() == 1 ? singular : plural;
}

/// A collective that some ranks have called and not finished.
struct Open {
  std::set<int> waiting;
  std::set<int> failed;
  std::string call;           ///< as the first rank made it
  int64_t since = INT64_MAX;  ///< Unix time of the first call, ns
};

class Story {
  using Key = std::pair<std::string, uint64_t>;  // group and sequence
  using CallsByRank = std::map<int, const RankRecord::Call*>;

 public:
  explicit Story(const std::vector<FlightFile>& files) : files_(files) {
    for (const FlightFile& file : files) {
      for (const RankRecord& record : file.records) ranks_.emplace(record.rank, &record);
    }
    for (const auto& [rank, record] : ranks_) {
      for (const RankRecord::Group& group : record->groups) {
        members_[group.name].insert(group.ranks.begin(), group.ranks.end());
      }
      for (const RankRecord::Call& call : record->calls) {
        if (!call.is_collective() || call.group >= record->groups.size()) continue;
        calls_[{record->groups[call.group].name, call.sequence}][rank] = &call;
      }
    }
  }

  std::string text() const {
    std::string text = head() + missing();
    const std::string waits = collectives() + transfers();
    const bool is_whole = !ranks_.empty();
    text += waits.empty() && is_whole
                ? "No call was open: every rank had finished all that it had called.\n"
                : waits;
    return text + table();
  }

 private:
  std::string head() const {
    const FlightFile& first = files_.front();
    const std::time_t seconds = first.unix_ns / 1'000'000'000;
    return fmt::format("Job {}, attempt {}, {}, at {:%Y-%m-%d %H:%M:%S}: {}\n\n", first.job,
                       first.attempt, base::counted(first.world_size, "rank"),
                       *std::localtime(&seconds), first.why);
  }

  std::string missing() const {
    std::string text;
    std::set<int> recorded;
    for (const FlightFile& file : files_) recorded.insert(file.ranks.begin(), file.ranks.end());
    std::set<int> cut;
    std::set<int> other;
    for (int rank = 0; rank < files_.front().world_size; ++rank) {
      if (ranks_.count(rank) == 0) (recorded.count(rank) > 0 ? cut : other).insert(rank);
    }
    for (const FlightFile& file : files_) {
      if (file.is_complete && file.damaged_lines == 0) continue;
      text += fmt::format("A file is {}", file.is_complete ? "damaged" : "cut");
      text += cut.empty() ? ".\n" : fmt::format(": the records of {} are missing.\n", list_of(cut));
    }
    bool has_all_nodes = false;
    for (const FlightFile& file : files_) {
      has_all_nodes = has_all_nodes || file.has_all_nodes;
      for (const FlightFile::Missing& one : file.missing) {
        std::set<int> ranks;
        for (const int rank : one.ranks) {
          if (other.erase(rank) > 0) ranks.insert(rank);
        }
        if (ranks.empty()) continue;
        text += fmt::format("The records of {} of {} are missing: {}.\n", list_of(ranks), one.node,
                            one.why);
      }
    }
    if (!other.empty()) {
      text += fmt::format("Nothing is recorded of {}: {}.\n", list_of(other),
                          has_all_nodes
                              ? "no call in a process group of this library is known"
                              : "give the files of the other nodes as well, if there are any");
    }
    return text.empty() ? "" : text + "\n";
  }

  std::string collectives() const {
    std::string text;
    size_t told = 0;
    for (const auto& [key, calls] : calls_) {
      const auto open = open_in(calls);
      if (!open || ++told > kMaxCollectives) continue;
      text += fmt::format("#{} of group '{}', {}:\n", key.second, key.first, open->call);
      const double ago = std::max(0.0, static_cast<double>(files_.front().unix_ns) / 1e9 -
                                           static_cast<double>(open->since) / 1e9);
      if (!open->waiting.empty()) {
        text += fmt::format("  {} {} in it, for {}\n", list_of(open->waiting),
                            verb(open->waiting, "waits", "wait"), base::format_seconds(ago));
      }
      if (!open->failed.empty()) {
        text += fmt::format("  it failed on {}, begun {} before\n", list_of(open->failed),
                            base::format_seconds(ago));
      }
      text += others(key, calls, *open);
    }
    if (told > kMaxCollectives) {
      text += fmt::format("{} more collectives are open.\n", told - kMaxCollectives);
    }
    return text;
  }

  /// Empty if all ranks that have called it have finished it.
  std::optional<Open> open_in(const CallsByRank& calls) const {
    Open open;
    for (const auto& [rank, call] : calls) {
      if (call->state == base::FlightLayout::kSucceeded) continue;
      const int64_t begin = ranks_.at(rank)->unix_time(call->begin);
      if (open.waiting.empty() && open.failed.empty()) open.call = call->describe();
      open.since = std::min(open.since, begin);
      (call->state == base::FlightLayout::kFailed ? open.failed : open.waiting).insert(rank);
    }
    if (open.waiting.empty() && open.failed.empty()) return std::nullopt;
    return open;
  }

  /// Describes the group's ranks that are not in the collective.
  std::string others(const Key& key, const CallsByRank& calls, const Open& open) const {
    const auto& [group, sequence] = key;
    std::string text;
    std::map<std::string, std::set<int>> different;  // ranks, by the call that they made instead
    std::set<int> finished;
    std::set<int> unknown;
    std::set<int> absent;
    for (const int rank : members_.at(group)) {
      const auto found = ranks_.find(rank);
      const auto own = calls.find(rank);
      if (found == ranks_.end()) {
        unknown.insert(unknown.end(), rank);
      } else if (own == calls.end() && last_in(group, *found->second) < sequence) {
        absent.insert(absent.end(), rank);
      } else if (!open.waiting.contains(rank) && !open.failed.contains(rank)) {
        finished.insert(finished.end(), rank);
      }
      if (own == calls.end()) continue;
      const std::string call = own->second->describe();
      if (call != open.call) different[call].insert(rank);
    }
    for (const auto& [call, ranks] : different) {
      text += fmt::format("  on {} it is {}\n", list_of(ranks), call);
    }
    const bool all_came = absent.empty() && unknown.empty();
    for (size_t named = 0; !absent.empty() && named < kMaxNamed; ++named) {
      text += absence(group, *ranks_.at(*absent.begin()));
      absent.erase(absent.begin());
    }
    if (!absent.empty())
      text += fmt::format("  {} {} not either\n", list_of(absent), verb(absent, "has", "have"));
    if (!finished.empty()) text += fmt::format("  {} finished it\n", list_of(finished));
    if (!unknown.empty()) text += fmt::format("  nothing is known of {}\n", list_of(unknown));
    if (all_came) text += "  all ranks of the group have called it\n";
    return text;
  }

  std::string absence(const std::string& group, const RankRecord& record) const {
    const uint64_t last = last_in(group, record);
    std::string text = "it has called nothing in this group";
    if (last > 0) text = fmt::format("its last call of this group is #{}", last);
    if (const auto calls = calls_.find({group, last}); calls != calls_.end()) {
      const auto own = calls->second.find(record.rank);  // the record keeps only the latest calls
      if (own != calls->second.end()) text += ", " + own->second->describe();
    }
    return fmt::format("  rank {} ({}) has not come to it: {}\n", record.rank, record.host, text);
  }

  /// The sequence of the rank's latest collective in the group; 0: none.
  static uint64_t last_in(const std::string& group, const RankRecord& record) {
    const auto own = std::ranges::find(record.groups, group, &RankRecord::Group::name);
    return own == record.groups.end() ? 0 : own->last;
  }

  std::string transfers() const {
    std::string text;
    for (const auto& [rank, record] : ranks_) {
      for (const RankRecord::Call& call : record->calls) {
        if (call.is_collective() || call.state == base::FlightLayout::kSucceeded) continue;
        text += fmt::format("Rank {}: {} {} rank {} {}.\n", rank, call.describe(),
                            call.kind == "send" ? "to" : "from", call.peer,
                            call.state == base::FlightLayout::kFailed ? "failed" : "waits");
      }
    }
    return text;
  }

  std::string table() const {
    std::vector<std::vector<std::string>> rows{{"rank", "host", "calls", "the last one"}};
    for (const auto& [rank, record] : ranks_) {
      const bool is_idle = record->calls.empty();
      rows.push_back({std::to_string(rank), base::truncated(record->host, 14),
                      std::to_string(is_idle ? 0 : record->calls.back().number),
                      is_idle ? "none" : record->name_of(record->calls.back())});
    }
    return "\n" + text_table(">5 <14 >7 <0", rows);
  }

  const std::vector<FlightFile>& files_;
  std::map<int, const RankRecord*> ranks_;
  std::map<std::string, std::set<int>> members_;  ///< by group
  std::map<Key, CallsByRank> calls_;              ///< collectives
};

/// Makes a file of records that are still in memory.
FlightFile file_of(std::vector<RankRecord> records, const std::string& source) {
  FlightFile file{
      .job = "of " + source, .world_size = records.front().world_size, .why = "as it is now"};
  for (RankRecord& record : records) file.add(std::move(record));
  return file;
}

/// The workers of all nodes of a running launcher. If it has one node or does not answer, the
/// workers of its node, read from their memory.
FlightFile live_file(pid_t launcher) {
  const auto of_all_nodes = ask_for_records(launcher);
  if (of_all_nodes && !of_all_nodes->empty()) {
    return FlightFile::of(*of_all_nodes, fmt::format("the answer of launcher {}", launcher));
  }
  if (!of_all_nodes) {
    base::write_stderr(
        fmt::format("syncbn-launch: warning: {}: these are the ranks of its node only\n",
                    no_answer_from(launcher)));
  }
  std::vector<RankRecord> records;
  std::error_code ignored;
  for (const fs::path& fd : entries_of(fmt::format("/proc/{}/fd", launcher))) {
    if (fs::read_symlink(fd, ignored).string().find(RankMemory::kName) == std::string::npos) {
      continue;
    }
    if (auto record = read_rank_record(base::open_to_read(fd).get())) {
      records.push_back(std::move(*record));
    }
  }
  if (records.empty()) {
    throw base::UserError(fmt::format(
        "process {} is no launcher of this user with workers that use syncbn's process groups; run "
        "`syncbn-launch status` to list launchers",
        launcher));
  }
  return file_of(std::move(records), fmt::format("launcher {}", launcher));
}

FlightFile flight_file_at(const std::string& path) {
  const auto pid = base::parse_number<pid_t>(path);
  if (pid && !fs::exists(path)) return live_file(*pid);
  std::error_code ignored;
  if (fs::is_directory(path, ignored) || fs::is_character_file(path, ignored)) {
    throw base::UserError(fmt::format(
        "explain: {} is no file; name the flight.jsonl of a failed job, or a file of a rank",
        path));
  }
  if (auto record = read_rank_record(base::open_to_read(path).get()))
    return file_of({std::move(*record)}, "files of ranks");
  return FlightFile::of(base::read_file(path, FlightFile::kMaxBytes), path);
}

/// The records of all files, and the ranks that are missing from them.
FlightFile one_file(const std::vector<FlightFile>& files) {
  FlightFile all = files.front();
  all.records.clear();
  all.missing.clear();
  std::set<int> recorded;
  std::set<int> cut;
  for (const FlightFile& file : files) {
    all.has_all_nodes = all.has_all_nodes || file.has_all_nodes;
    all.missing.insert(all.missing.end(), file.missing.begin(), file.missing.end());
    cut.insert(file.ranks.begin(), file.ranks.end());
    for (const RankRecord& record : file.records) {
      if (recorded.insert(record.rank).second) all.records.push_back(record);
    }
  }
  std::erase_if(cut, [&recorded](int rank) { return recorded.contains(rank); });
  if (!cut.empty()) {
    all.missing.push_back({"a node", {cut.begin(), cut.end()}, "its file was cut or damaged"});
  }
  return all;
}

void write_for_torch(const std::vector<FlightFile>& files, const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  for (const FlightFile& file : files) {
    for (const RankRecord& record : file.records) {
      base::write_file_atomically(folder / fmt::format("rank_{}", record.rank),
                                  torch_pickle(record));
    }
  }
}

}  // namespace

std::string explanation(const std::vector<FlightFile>& files) {
  return Story(files).text();
}

void explain(const std::vector<std::string>& arguments) {
  constexpr std::string_view kTorch = "--torch=";
  constexpr std::string_view kSave = "--save=";
  std::optional<std::string> folder;
  std::optional<std::string> saved;
  std::vector<FlightFile> files;
  for (const std::string& word : arguments) {
    if (word.starts_with(kTorch)) {
      folder = word.substr(kTorch.size());
    } else if (word.starts_with(kSave)) {
      saved = word.substr(kSave.size());
    } else if (!word.starts_with('-')) {
      files.push_back(flight_file_at(word));
    } else {
      throw base::UserError(
          fmt::format("explain: {} is not among its options; it takes --save=FILE and "
                      "--torch=FOLDER",
                      word));
    }
  }
  if (files.empty()) {
    throw base::UserError(
        "usage: syncbn-launch explain [--save=FILE] [--torch=FOLDER] FILE..., with the file that a "
        "failed job names, or the process id of a launcher");
  }
  for (const FlightFile& file : files) {
    if (file.job != files.front().job || file.attempt != files.front().attempt) {
      throw base::UserError(
          fmt::format("the files are of different jobs or attempts: {} ({}) and {} "
                      "({})",
                      files.front().job, files.front().attempt, file.job, file.attempt));
    }
  }
  base::write_stdout(explanation(files));
  if (saved) base::write_file_atomically(*saved, one_file(files).text());
  if (folder) write_for_torch(files, *folder);
}

}  // namespace syncbn::launch
