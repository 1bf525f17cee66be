#include "job/job_leader.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>

namespace syncbn::launch {
namespace {

// Time for the nodes to say what their workers do.
constexpr std::chrono::seconds kInquiryPatience{2};
// Time for a node to end its workers, after --shutdown_timeout.
constexpr std::chrono::seconds kEndPatience{30};
// Time for the nodes to send their ranks' flight records, which the end of the job or a user waits
// for.
constexpr std::chrono::milliseconds kRecordPatience{1500};

bool is_failure_code(int exit_code) {
  return exit_code > base::kExitOk && exit_code <= 255;
}

}  // namespace

JobLeader::JobLeader(const LaunchOptions& options, std::string job_id, Time now)
    : options_(options),
      job_id_(std::move(job_id)),
      now_(now),
      join_deadline_(now + options.join_timeout),
      next_notice_(now + kNoticePeriod),
      restart_policy_(options.max_restarts, options.restart_window),
      stragglers_(options.straggler_interval) {}

std::string JobLeader::refusal(const Hello& hello) const {
  if (is_excluded(hello.host) && present() >= options_.nnodes.min) return exclusion(hello.host);
  if (hello.node >= options_.nnodes.max || hello.nproc < 1 || hello.nproc > kMaxWorkers) {
    return fmt::format("{} claims to be node {} with {}", hello.host, hello.node,
                       base::counted(hello.nproc, "worker"));
  }
  if (const auto other = nodes_.find(hello.node); other != nodes_.end()) {
    return fmt::format("two launchers have --node_rank={}: one on {} and one on {}", hello.node,
                       other->second.host, hello.host);
  }
  if (hello.exit_code != base::kExitOk && !is_failure_code(hello.exit_code)) {
    return fmt::format("{} reported the exit code {} as a failure", hello.host, hello.exit_code);
  }
  if (torchruns_.contains(hello.node)) {
    return fmt::format("{} has --node_rank={}, and so has a torchrun of this job", hello.host,
                       hello.node);
  }
  const bool has_begun = state_ == State::kRunning || state_ == State::kLeaving;
  if (has_begun && !options_.nodes_may_change()) return "the job has begun without this launcher";
  return "";
}

int JobLeader::rank_for(int wanted, bool leads) const {
  if (wanted >= 0) return wanted;
  // Rank 0 is the node with the store.
  int rank = leads ? 0 : 1;
  while (has(rank)) ++rank;
  return rank;
}

void JobLeader::join(int rank, const Hello& hello, Time now) {
  now_ = now;
  nodes_[rank] = {.host = hello.host,
                  .name = hello.host.empty() ? "" : fmt::format("node {} ({})", rank, hello.host),
                  .role = {hello.role, rank, hello.nproc}};
  if (state_ == State::kFinished) return send(rank, Finish{failure_});
  if (state_ == State::kJoining) return start_if_enough_nodes();
  if (failed_ || !node_change_.empty()) return;  // it takes part in the next attempt
  const bool any_ended =
      std::ranges::any_of(nodes_, [](const auto& one) { return one.second.ended; });
  if (!any_ended && taking_part() < options_.nnodes.max) {
    return change_nodes(nodes_[rank].name + " has joined");
  }
  send(rank, Waiting{fmt::format("the job runs on {} without this one, which stands by",
                                 base::counted(taking_part(), "node"))});
}

void JobLeader::join_torchrun(int rank, const TorchrunRole& role, Time now) {
  now_ = now;
  torchruns_[rank] = role;
  start_if_enough_nodes();
}

void JobLeader::receive(int node, const FromNode& message, Time now) {
  now_ = now;
  if (!nodes_.contains(node)) return;
  std::visit([&](const auto& one) { on(node, one); }, message);
  const auto found = nodes_.find(node);
  if (found != nodes_.end()) found->second.paused = std::holds_alternative<Pause>(message);
}

void JobLeader::on(int node, const Failed& message) {
  if (!accepts(node, message.exit_code) || message.attempt != attempt_) return;
  JobFailure failure = message;
  if (!is_of(node, failure.rank)) failure.rank = -1;
  failure.what = nodes_[node].says(message.what);
  fail(failure, node);
}

void JobLeader::on(int node, const EndJob& message) {
  if (!accepts(node, message.exit_code)) return;
  end(message.exit_code, nodes_[node].says(message.what), now_);
}

bool JobLeader::accepts(int node, int exit_code) {
  if (is_failure_code(exit_code)) return true;
  const std::string why =
      fmt::format("{} reported the exit code {} as a failure", nodes_[node].name, exit_code);
  notice("refused a launcher: " + why);
  refuse(node, base::kExitInternal, why);
  return false;
}

void JobLeader::on(int node, const Leave& /*message*/) {
  Node& own = nodes_[node];
  if (!options_.nodes_may_change()) return;
  own.leaving = true;
  if (own.takes_part && !failed_) change_nodes(own.name + " leaves");
  if (!own.takes_part || own.ended) refuse(node, base::kExitUnavailable, "it has left");
}

void JobLeader::on(int node, const Ended& message) {
  if (message.attempt != attempt_) return;
  nodes_[node].ended = true;
  if (state_ == State::kRunning && all_ended()) end_attempt();
  if (const auto own = nodes_.find(node); own != nodes_.end() && own->second.leaving) {
    refuse(node, base::kExitUnavailable,
           own->second.excluded ? exclusion(own->second.host) : "it has left");
  }
}

void JobLeader::on(int /*node*/, const Stalled& message) {
  Inquiry& inquiry = inquire();
  if (message.attempt != attempt_) return;
  inquiry.no_progress = message.seconds;
  inquiry.ends_culprit = message.ends;
}

void JobLeader::on(int node, const Workers& message) {
  if (!inquiry_ || inquiry_->open.erase(node) == 0) return;
  std::ranges::copy_if(message.workers, std::back_inserter(inquiry_->workers),
                       [&](const WorkerState& worker) { return is_of(node, worker.rank); });
  if (inquiry_->open.empty()) conclude_inquiry();
}

void JobLeader::on(int node, const AskAllRecords& /*message*/) {
  if (state_ != State::kRunning) return send_records(node, {});
  if (!collection_) ask_for_records("as it is now", /*ends_attempt=*/false);
  collection_->asking.insert(node);
}

void JobLeader::on(int node, const Record& message) {
  const RankRecord& record = message.record;
  if (!is_answer(node, message.question) || !is_of(node, record.rank)) return;
  // Shorter than as text, unless it is not from shorten().
  if (record.bytes() > 2 * RecordQuota::of(world_size_).bytes) return;
  collection_->file.records.emplace(record.rank, record);
}

void JobLeader::on(int node, const Records& message) {
  if (!is_answer(node, message.question)) return;
  collection_->sent.insert(node);
  collection_->open.erase(node);
  check_collection();
}

void JobLeader::check_collection() {
  if (!collection_ || (!collection_->open.empty() && now_ < collection_->deadline)) return;
  collection_->ends_attempt ? end_attempt() : conclude_collection();
}

void JobLeader::lose(int node, Time now) {
  now_ = now;
  if (nodes_.contains(node)) remove(node);
}

void JobLeader::refuse(int node, int exit_code, const std::string& why) {
  send(node, Refuse{exit_code, why});
  remove(node);
}

void JobLeader::remove(int node) {
  const Node lost = nodes_[node];
  nodes_.erase(node);
  if (collection_) collection_->open.erase(node);
  const bool has_left = lost.leaving || lost.ended;
  const JobFailure gone = job_failure(attempt_, base::kExitUnavailable,
                                      fmt::format("the launcher of {} is gone", lost.name));
  if (state_ == State::kJoining) {
    const bool was_needed = attempt_ > 0 && lost.takes_part && !options_.nodes_may_change();
    return was_needed ? finish(gone) : start_if_enough_nodes();  // it may join again
  }
  if (state_ != State::kRunning || !lost.takes_part) return;
  if (!has_left) {
    ++failures_[lost.host];
    // Its keeper kills its workers. If they have already succeeded, nothing is lost.
    if (!collection_ || !collection_->ends_attempt) wants_records_ = true;
    options_.nodes_may_change() ? change_nodes(lost.name + " is lost") : fail(gone);
  }
  all_ended() ? end_attempt() : check_collection();
}

void JobLeader::end(int exit_code, const std::string& what, Time now) {
  now_ = now;
  if (state_ == State::kFinished) return;
  const JobFailure failure = job_failure(attempt_, exit_code, what);
  // No workers run.
  if (state_ == State::kJoining || state_ == State::kLeaving) return finish(failure);
  node_change_.clear();
  // The signal ends the job; the failure would only have restarted it.
  if (failed_ && failure_.may_restart) failure_ = failure;
  over_ = true;
  fail(failure);
}

void JobLeader::leave_barrier(bool complete, Time now) {
  now_ = now;
  if (state_ != State::kLeaving) return;
  if (complete) return finish({});
  finish(job_failure(attempt_, base::kExitUnavailable,
                     "a node that torchrun runs left before its workers had succeeded"));
}

JobLeader::Inquiry& JobLeader::inquire() {
  if (inquiry_) return *inquiry_;
  inquiry_ = Inquiry{.deadline = now_ + kInquiryPatience};
  for (const auto& [rank, node] : nodes_) {
    if (node.takes_part) inquiry_->open.insert(rank);
  }
  send_all(Inquire{});
  return *inquiry_;
}

void JobLeader::conclude_inquiry() {
  Inquiry inquiry = *std::exchange(inquiry_, std::nullopt);
  std::ranges::sort(inquiry.workers, {}, &WorkerState::rank);
  std::vector<ShownText> notes;
  for (const int rank : inquiry.open) {
    if (nodes_.contains(rank)) notes.emplace_back(nodes_[rank].name + " does not answer");
  }
  for (const int rank : inquiry.asking) {
    if (nodes_.contains(rank)) send(rank, Status{inquiry.workers, notes});
  }
  const bool is_ending = state_ != State::kRunning || failed_ || !node_change_.empty();
  // A launcher that does not answer is stopped or lost, which the heartbeats will show.
  if (is_ending || !inquiry.open.empty()) return;
  if (inquiry.compares_speed) {
    for (const std::string& line : stragglers_.add(inquiry.workers)) notice(line);
  }
  if (!inquiry.no_progress) return;
  const bool is_paused = std::ranges::any_of(
      nodes_, [](const auto& one) { return one.second.takes_part && one.second.paused; });
  if (is_paused) return send_all(Hold{});
  const auto hang = judge_hang(inquiry.workers, *inquiry.no_progress, inquiry.ends_culprit);
  if (hang) send_all(NameHang{*hang});
}

void JobLeader::ask_for_records(const std::string& why, bool ends_attempt) {
  collection_ = Collection{.number = ++collections_,
                           .deadline = now_ + kRecordPatience,
                           .ends_attempt = ends_attempt,
                           .file = {.job = job_id_,
                                    .attempt = attempt_,
                                    .world_size = world_size_,
                                    .why = why,
                                    .has_all_nodes = true}};
  for (const auto& [rank, node] : nodes_) {
    if (!node.takes_part) continue;
    collection_->open.insert(rank);
    send(rank, AskRecords{collection_->number});
  }
}

bool JobLeader::is_of(int node, int rank) const {
  const auto part = parts_.find(node);
  return part != parts_.end() && rank >= part->second.first &&
         rank - part->second.first < part->second.count;
}

bool JobLeader::is_answer(int node, int question) const {
  return collection_ && collection_->open.contains(node) && question == collection_->number;
}

void JobLeader::conclude_collection() {
  Collection collection = *std::exchange(collection_, std::nullopt);
  for (const auto& [rank, part] : parts_) {
    if (collection.sent.contains(rank)) continue;
    FlightFile::Missing& missing = collection.file.missing.emplace_back();
    missing.node = part.node;
    for (int worker = part.first; worker < part.first + part.count; ++worker) {
      if (!collection.file.records.contains(worker)) missing.ranks.push_back(worker);
    }
    missing.why =
        collection.open.contains(rank)
            ? fmt::format("it did not send them within {}", base::format_seconds(kRecordPatience))
            : "its launcher is gone";
  }
  for (const int rank : collection.asking) {
    if (nodes_.contains(rank)) send_records(rank, collection.file);
  }
  if (collection.ends_attempt) records_ = std::move(collection.file);
}

void JobLeader::send_records(int node, const FlightFile& file) {
  for (const auto& [rank, record] : file.records) send(node, Record{0, record});
  send(node, AllRecords{file});
}

bool JobLeader::compares_speed() const {
  return state_ == State::kRunning && options_.straggler_interval.count() > 0 && world_size_ > 1;
}

void JobLeader::tick(Time now) {
  now_ = now;
  check_collection();
  if (inquiry_ && now >= inquiry_->deadline) conclude_inquiry();
  if (end_by_ && now >= *end_by_) drop_late_nodes();
  if (compares_speed() && now >= next_comparison_) {
    next_comparison_ = now + options_.straggler_interval;
    inquire().compares_speed = true;
  }
  if (restart_at_ && now >= *restart_at_) {
    restart_at_.reset();
    if (state_ == State::kJoining && present() >= options_.nnodes.min) start_attempt();
  }
  if (state_ == State::kJoining && last_call_ && now >= *last_call_) start_attempt();
  if (state_ == State::kJoining && !last_call_ && now >= join_deadline_) {
    finish(job_failure(attempt_, base::kExitUnavailable,
                       fmt::format("{} did not arrive within {} (--rdzv_conf=join_timeout=SECONDS)",
                                   missing(), base::format_seconds(options_.join_timeout))));
  }
  if (state_ == State::kJoining && now >= next_notice_) {
    next_notice_ = now + kNoticePeriod;
    send_all(Waiting{fmt::format("waiting for {}", missing())});
  }
}

// Not node 0: its launcher, which this is, has deadlines of its own.
void JobLeader::drop_late_nodes() {
  end_by_.reset();
  for (const auto& [rank, node] : std::map(nodes_)) {
    if (!node.takes_part || node.ended || rank == 0) continue;
    if (node.paused) {
      end_by_ = now_ + kEndPatience;
      continue;
    }
    notice(node.name + ": its workers have not ended in time; it counts as lost");
    refuse(rank, base::kExitUnavailable, "its workers have not ended in time");
  }
}

JobLeader::Time JobLeader::due() const {
  const bool is_joining = state_ == State::kJoining;
  Time due = is_joining ? std::min(next_notice_, last_call_.value_or(join_deadline_)) : Time::max();
  for (const auto& time : {restart_at_, end_by_}) due = std::min(due, time.value_or(due));
  if (inquiry_) due = std::min(due, inquiry_->deadline);
  if (collection_) due = std::min(due, collection_->deadline);
  return compares_speed() ? std::min(due, next_comparison_) : due;
}

std::string JobLeader::missing() const {
  if (options_.c10d) {  // its nodes have no ranks to name
    const int wanted = last_call_ ? options_.nnodes.max : options_.nnodes.min;
    return fmt::format("{} ({} here, --nnodes={})", base::counted(wanted - present(), "more node"),
                       present(), options_.nnodes.str());
  }
  std::vector<std::string> names;
  for (int rank = 0; rank < options_.nnodes.max; ++rank) {
    if (!has(rank)) names.push_back(std::to_string(rank));
  }
  constexpr size_t kMaxNamed = 16;
  return fmt::format("node{} {}", names.size() == 1 ? "" : "s",
                     base::join_some(names, ", ", kMaxNamed));
}

int JobLeader::present() const {
  const auto stays = [](const auto& one) { return !one.second.leaving; };
  return static_cast<int>(std::ranges::count_if(nodes_, stays) + std::ssize(torchruns_));
}

int JobLeader::taking_part() const {
  const auto takes_part = [](const auto& one) { return one.second.takes_part; };
  return static_cast<int>(std::ranges::count_if(nodes_, takes_part) + std::ssize(torchruns_));
}

bool JobLeader::all_ended() const {
  const auto has_ended = [](const auto& one) { return one.second.ended || !one.second.takes_part; };
  return std::ranges::all_of(nodes_, has_ended);
}

void JobLeader::start_if_enough_nodes() {
  if (restart_at_ || state_ != State::kJoining) return;
  if (present() >= options_.nnodes.max) return start_attempt();
  if (present() < options_.nnodes.min) return last_call_.reset();
  if (!last_call_) last_call_ = now_ + options_.last_call;
}

void JobLeader::start_attempt() {
  if (inquiry_) conclude_inquiry();  // about the last attempt: only `status` gets an answer
  state_ = State::kRunning;
  restart_policy_.attempt_started(now_);
  stragglers_ = StragglerWatch(options_.straggler_interval);
  next_comparison_ = now_ + options_.straggler_interval;
  failed_ = wants_records_ = false;
  no_restart_.clear();
  parts_.clear();
  node_change_.clear();
  last_call_.reset();
  std::map<int, TorchrunRole> all = torchruns_;
  // Nodes of the last attempt first: a newcomer may have got the rank of a lost node.
  for (const bool took_part : {true, false}) {
    for (auto& [rank, node] : nodes_) {
      if (all.contains(rank) || node.takes_part != took_part) continue;
      node.takes_part = !node.leaving && std::ssize(all) < options_.nnodes.max;
      node.ended = false;
      if (node.takes_part) all[rank] = node.role;
    }
  }
  int index = 0;
  for (const auto& [rank, ranks] : assign_ranks(all)) {
    world_size_ = ranks.world_size;
    if (const auto node = nodes_.find(rank); node != nodes_.end()) {
      parts_[rank] = {node->second.name, ranks.base, node->second.role.local_world_size};
    }
    send(rank, Start{{.master_addr = {},
                      .job_id = {},
                      .attempt = attempt_,
                      .restart_count = restarts_,
                      .reason = reason_,
                      .node = index++,
                      .nodes = static_cast<int>(std::ssize(all)),
                      .ranks = ranks}});
  }
}

void JobLeader::change_nodes(const std::string& what) {
  if (state_ != State::kRunning || over_ || !node_change_.empty()) return;
  // An earlier failure is a consequence: workers often notice a lost node first.
  node_change_ = what;
  if (!failed_) stop_attempt(job_failure(attempt_, base::kExitOk, what));
}

void JobLeader::fail(const JobFailure& failure, int node) {
  // Later failures follow from the first one, or from the change of nodes.
  if (failed_ || !node_change_.empty() || state_ != State::kRunning) return;
  // A worker that no restart helps has said what was wrong. After a signal, the file is of use only
  // in a folder that the user has asked for.
  wants_records_ = wants_records_ || failure.may_restart || !options_.log_dir.empty();
  if (failure.may_restart && goes_on_without(node, failure.what)) return;
  failed_ = true;
  failure_ = failure;
  restart_policy_.failed(failure, now_);
  const std::string refusal = restart_policy_.refusal();
  if (failure.may_restart && options_.max_restarts > 0) no_restart_ = refusal;
  failure_.may_restart = failure.may_restart && refusal.empty() && torchruns_.empty();
  stop_attempt(failure);
}

bool JobLeader::is_excluded(const std::string& host) const {
  const int limit = options_.exclude_failing;
  return limit > 0 && failures_.contains(host) && failures_.at(host) >= limit;
}

std::string JobLeader::exclusion(const std::string& host) const {
  return fmt::format(
      "{} has failed {} in this job, which goes on without it (--exclude_failing={})", host,
      base::counted(failures_.at(host), "time"), options_.exclude_failing);
}

// Returns whether the job goes on without the node whose worker has failed.
bool JobLeader::goes_on_without(int rank, const std::string& what) {
  const auto found = nodes_.find(rank);
  if (found == nodes_.end()) return false;
  Node& node = found->second;
  ++failures_[node.host];
  // Node 0 leads.
  if (!is_excluded(node.host) || rank == 0 || present() <= options_.nnodes.min) return false;
  node.leaving = node.excluded = true;
  change_nodes(fmt::format("{} is left out: {}; {}", node.name, what, exclusion(node.host)));
  return true;
}

void JobLeader::stop_attempt(const JobFailure& why) {
  end_by_ = now_ + options_.shutdown_timeout + kEndPatience;
  send_all(Stop{failed_ && !over_, why});
}

void JobLeader::end_attempt() {
  end_by_.reset();
  if (collection_ && !collection_->ends_attempt) conclude_collection();
  // The only node of an attempt writes the file of all ranks itself.
  if (std::exchange(wants_records_, false) && parts_.size() > 1) {
    ask_for_records(failed_ ? failure_.what : node_change_, /*ends_attempt=*/true);
  }
  if (collection_) {
    if (!collection_->open.empty() && now_ < collection_->deadline) return;
    conclude_collection();
  }
  if (!node_change_.empty()) return start_again(node_change_);
  if (!failed_ && torchruns_.empty()) return finish({});
  if (!failed_) {
    state_ = State::kLeaving;
    return;
  }
  if (!no_restart_.empty() && !over_) notice(no_restart_);
  const bool can_restart = options_.nodes_may_change() || present() == options_.nnodes.max;
  if (!failure_.may_restart || !can_restart) return finish(failure_);
  ++restarts_;
  const auto delay = restart_policy_.restart();
  if (delay.count() > 0) restart_at_ = now_ + delay;
  start_again(failure_.what);
}

void JobLeader::start_again(const std::string& reason) {
  ++attempt_;
  reason_ = reason;
  state_ = State::kJoining;
  // The wait for nodes begins at restart_at_.
  const auto begin = restart_at_.value_or(now_);
  join_deadline_ = begin + options_.join_timeout;
  next_notice_ = begin;
  // Does not wait for more nodes than the minimum.
  if (!restart_at_ && present() >= options_.nnodes.min) start_attempt();
}

void JobLeader::finish(const JobFailure& result) {
  state_ = State::kFinished;
  failure_ = result;
  send_all(Finish{result});
}

}  // namespace syncbn::launch
