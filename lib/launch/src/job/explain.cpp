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

class Story {
  using Key = std::pair<std::string, uint64_t>;  // group and sequence
  using CallsByRank = std::map<int, const RankRecord::Call*>;
  using Layout = base::FlightLayout;

 public:
  /// @param file must outlive this object.
  explicit Story(const FlightFile& file) : file_(file), ranks_(file.records) {
    std::set<std::pair<std::string, RankRuns>> known;  // ranks of a group tell the same of it
    for (const auto& [rank, record] : ranks_) {
      for (const RankRecord::Group& group : record.groups) {
        if (!known.emplace(group.name, group.ranks).second) continue;
        const auto ranks = ranks_in(group.ranks, RankRecord::kMaxRanksInGroups);
        members_[group.name].insert(ranks.begin(), ranks.end());
      }
      for (const RankRecord::Call& call : record.calls) {
        if (!call.is_collective() || call.group >= record.groups.size()) continue;
        calls_[{record.groups[call.group].name, call.sequence}][rank] = &call;
      }
    }
  }

  std::string text() const {
    std::string text = head() + missing();
    const std::string waits = collectives() + transfers();
    text += waits.empty() && !ranks_.empty()
                ? "No call was open: every rank had finished all that it had called.\n"
                : waits;
    return text + table();
  }

 private:
  std::string head() const {
    const std::time_t seconds = file_.unix_ns / 1'000'000'000;
    return fmt::format("Job {}, attempt {}, {}, at {:%Y-%m-%d %H:%M:%S}: {}\n\n", file_.job,
                       file_.attempt, base::counted(file_.world_size, "rank"),
                       *std::localtime(&seconds), file_.why);
  }

  std::string missing() const {
    std::string text;
    std::set<int> other;
    for (int rank = 0; rank < file_.world_size; ++rank) {
      if (!ranks_.contains(rank)) other.insert(rank);
    }
    for (const FlightFile::Missing& one : file_.missing) {
      std::set<int> ranks;
      for (const int rank : one.ranks) {
        if (other.erase(rank) > 0) ranks.insert(rank);
      }
      if (ranks.empty()) continue;
      text += fmt::format("The records of {} of {} are missing: {}.\n", list_of(ranks), one.node,
                          one.why);
    }
    if (!other.empty()) {
      text += fmt::format("Nothing is recorded of {}: {}.\n", list_of(other),
                          file_.has_all_nodes
                              ? "no call in a process group of this library is known"
                              : "give the files of the other nodes as well, if there are any");
    }
    return text.empty() ? "" : text + "\n";
  }

  std::string collectives() const {
    std::string text;
    size_t open = 0;
    for (const auto& [key, calls] : calls_) {
      const auto is_open = [](const auto& one) { return one.second->state != Layout::kSucceeded; };
      if (std::ranges::none_of(calls, is_open) || ++open > kMaxCollectives) continue;
      text += collective(key, calls);
    }
    if (open > kMaxCollectives) {
      text += fmt::format("{} more collectives are open.\n", open - kMaxCollectives);
    }
    return text;
  }

  /// @param calls of a collective that some ranks have called and not finished.
  std::string collective(const Key& key, const CallsByRank& calls) const {
    const auto& [group, sequence] = key;
    std::set<int> waiting;
    std::set<int> failed;
    std::string open;           // as the first rank made it
    int64_t since = INT64_MAX;  // Unix time of the first call, ns
    for (const auto& [rank, call] : calls) {
      if (call->state == Layout::kSucceeded) continue;
      if (open.empty()) open = call->describe();
      since = std::min(since, ranks_.at(rank).unix_time(call->begin));
      (call->state == Layout::kFailed ? failed : waiting).insert(rank);
    }
    std::map<std::string, std::set<int>> different;  // ranks, by the call that they made instead
    std::set<int> finished;
    std::set<int> unknown;
    std::set<int> absent;
    for (const int rank : members_.at(group)) {
      const auto found = ranks_.find(rank);
      const auto own = calls.find(rank);
      if (found == ranks_.end()) {
        unknown.insert(rank);
      } else if (own == calls.end()) {
        (last_in(group, found->second) < sequence ? absent : finished).insert(rank);
      } else if (own->second->state == Layout::kSucceeded) {
        finished.insert(rank);
      }
      const std::string call = own == calls.end() ? open : own->second->describe();
      if (call != open) different[call].insert(rank);
    }
    const std::string ago = base::format_seconds(
        std::max(0.0, static_cast<double>(file_.unix_ns) / 1e9 - static_cast<double>(since) / 1e9));
    std::string text = fmt::format("#{} of group '{}', {}:\n", sequence, group, open);
    const auto add = [&text](const std::set<int>& ranks, const char* line, const auto&... more) {
      if (!ranks.empty()) text += fmt::format(fmt::runtime(line), list_of(ranks), more...);
    };
    add(waiting, "  {} {} in it, for {}\n", verb(waiting, "waits", "wait"), ago);
    add(failed, "  it failed on {}, begun {} before\n", ago);
    for (const auto& [call, ranks] : different) add(ranks, "  on {} it is {}\n", call);
    const bool all_came = absent.empty() && unknown.empty();
    for (size_t named = 0; !absent.empty() && named < kMaxNamed; ++named) {
      text += absence(group, ranks_.at(*absent.begin()));
      absent.erase(absent.begin());
    }
    add(absent, "  {} {} not either\n", verb(absent, "has", "have"));
    add(finished, "  {} finished it\n");
    add(unknown, "  nothing is known of {}\n");
    return text + (all_came ? "  all ranks of the group have called it\n" : "");
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
      for (const RankRecord::Call& call : record.calls) {
        if (call.is_collective() || call.state == Layout::kSucceeded) continue;
        text += fmt::format("Rank {}: {} {} rank {} {}.\n", rank, call.describe(),
                            call.kind == "send" ? "to" : "from", call.peer,
                            call.state == Layout::kFailed ? "failed" : "waits");
      }
    }
    return text;
  }

  std::string table() const {
    std::vector<std::vector<std::string>> rows{{"rank", "host", "calls", "the last one"}};
    for (const auto& [rank, record] : ranks_) {
      const bool is_idle = record.calls.empty();
      rows.push_back({std::to_string(rank), base::truncated(record.host, 14),
                      std::to_string(is_idle ? 0 : record.calls.back().number),
                      is_idle ? "none" : record.name_of(record.calls.back())});
    }
    return "\n" + text_table(">5 <14 >7 <0", rows);
  }

  const FlightFile& file_;
  const std::map<int, RankRecord>& ranks_;
  std::map<std::string, std::set<int>> members_;  ///< by group
  std::map<Key, CallsByRank> calls_;              ///< collectives
};

/// Makes a file of a record that is still in memory.
void add_to(FlightFile& file, const std::string& source, RankRecord record) {
  file.job = "of " + source;
  file.world_size = record.world_size;
  file.why = "as it is now";
  file.records.emplace(record.rank, std::move(record));
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
  FlightFile file;
  std::error_code ignored;
  for (const fs::path& fd : entries_of(fmt::format("/proc/{}/fd", launcher))) {
    if (fs::read_symlink(fd, ignored).string().find(RankMemory::kName) == std::string::npos) {
      continue;
    }
    if (auto record = read_rank_record(base::open_to_read(fd).get())) {
      add_to(file, fmt::format("launcher {}", launcher), *std::move(record));
    }
  }
  if (file.records.empty()) {
    throw base::UserError(fmt::format(
        "process {} is no launcher of this user with workers that use syncbn's process groups; run "
        "`syncbn-launch status` to list launchers",
        launcher));
  }
  return file;
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
  if (auto record = read_rank_record(base::open_to_read(path).get())) {
    FlightFile file;
    add_to(file, "files of ranks", *std::move(record));
    return file;
  }
  return FlightFile::of(base::read_file(path, FlightFile::kMaxBytes), path);
}

/// The records of all files, and the ranks that are missing from them.
FlightFile one_file(const std::vector<FlightFile>& files) {
  FlightFile all = files.front();
  all.missing.clear();
  std::set<int> cut;
  for (const FlightFile& file : files) {
    all.has_all_nodes = all.has_all_nodes || file.has_all_nodes;
    all.missing.insert(all.missing.end(), file.missing.begin(), file.missing.end());
    all.records.insert(file.records.begin(), file.records.end());
    cut.insert(file.ranks.begin(), file.ranks.end());
  }
  for (const auto& [rank, record] : all.records) cut.erase(rank);
  if (!cut.empty()) {
    all.missing.push_back({"a node", {cut.begin(), cut.end()}, "its file was cut or damaged"});
  }
  return all;
}

void write_for_torch(const FlightFile& file, const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  for (const auto& [rank, record] : file.records) {
    base::write_file_atomically(folder / fmt::format("rank_{}", rank), torch_pickle(record));
  }
}

}  // namespace

std::string explanation(const std::vector<FlightFile>& files) {
  const FlightFile all = one_file(files);
  return Story(all).text();
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
  const FlightFile all = one_file(files);
  base::write_stdout(Story(all).text());
  if (saved) base::write_file_atomically(*saved, all.text());
  if (folder) write_for_torch(all, *folder);
}

}  // namespace syncbn::launch
