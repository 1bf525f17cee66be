#include "nodes/coordinator.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "common/json_messages.h"

namespace syncbn::launch {

namespace {

using Json = nlohmann::json;

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

Coordinator::Coordinator(const LaunchOptions& options, std::string job_id, int master_port,
                         base::UniqueFd listener)
    : options_(options),
      job_id_(std::move(job_id)),
      master_port_(master_port),
      store_(std::move(listener), options.store_bytes(),
             {.foreign = [this](base::Channel channel) { peers_.add_newcomer(std::move(channel)); },
              .admits = [this](int client) { return admits(client); }}),
      torchrun_nodes_(store_, options.run_id, options.nnodes.max),
      peers_(Handshake(Handshake::Side::kServer, options.token), options.silence(), store_.fd()),
      join_deadline_(Clock::now() + options.join_timeout),
      next_notice_(Clock::now() + kNoticePeriod),
      next_alive_(Clock::now() + options.alive_period),
      policy_(options.max_restarts, options.restart_window),
      stragglers_(options.straggler_interval) {
  due_ = std::min(next_notice_, next_alive_);
}

void Coordinator::handle() {
  store_.handle();
  for (const std::string& notice : store_.take_notices()) notices_.push_back(notice);
  for (const std::string& refusal : store_.take_refusals()) note_stranger(refusal);
  // torchrun's agents cannot prove that they know a token.
  if (state_ == State::kJoining && !options_.c10d && options_.token.empty()) {
    torchrun_nodes_.find([this](int node) { return peers_.nodes().contains(node); });
    start_when_complete();
  }
  if (state_ == State::kLeaving) leave_torchruns_barrier();
  peers_.handle([this](PeerLauncher& node, const Json& message) { handle_message(node, message); });
  for (const std::string& refusal : peers_.take_refusals()) note_stranger(refusal);
  // A stopped node delays neither the end of an attempt that failed nor that of the job.
  const bool excuses_pauses = !failed_ || state_ == State::kJoining;
  for (PeerLauncher* node : peers_.gone(excuses_pauses)) lost(*node);
  handle_times();
}

void Coordinator::handle_message(PeerLauncher& node, const Json& message) {
  const std::string type = message.at("type");
  if (type == "hello") hello(node, message.get<Hello>());
  if (node.rank < 0) return;
  const auto what = [&] { return fmt::format("{}: {}", node.name(), shown_text(message, "what")); };
  if (type == "failed" || type == "end") {
    // Success is what node 0 concludes when the workers of all nodes have ended.
    const int exit_code = message.at("exit_code");
    if (!is_failure_code(exit_code)) {
      const std::string why =
          fmt::format("{} reported the exit code {} as a failure", node.name(), exit_code);
      notices_.push_back("refused a launcher: " + why);
      return node.refuse(base::kExitInternal, why);
    }
  }
  if (type == "failed" && message.at("attempt") == attempt_) {
    const Json& step = message.at("step");
    const int rank = message.at("rank");
    fail({.exit_code = message.at("exit_code"),
          .text = what(),
          .may_restart = message.at("may_restart"),
          .node = node.rank,
          .cause = {.rank = is_of(node, rank) ? rank : -1,
                    .status = message.at("status"),
                    .step = step.is_null() ? std::nullopt : std::optional<uint64_t>(step)}});
  }
  if (type == "end") end_job(message.at("exit_code"), what());
  if (type == "leave" && options_.nodes_may_change()) {
    node.leaving = true;
    if (node.takes_part && !failed_) change_nodes(node.name() + " leaves");
  }
  if (type == "ended" && message.at("attempt") == attempt_) {
    node.ended = true;
    if (state_ == State::kRunning && peers_.all_ended()) end_attempt();
  }
  if (type == "pause") node.paused = true;
  if (type == "ask_status" || type == "stalled") {
    inquire();
    if (type == "ask_status") inquiry_->asking.insert(node.rank);
    if (type == "stalled" && message.at("attempt") == attempt_) {
      inquiry_->no_progress = message.at("seconds");
      inquiry_->ends_culprit = message.at("ends");
    }
  }
  if (type == "workers" && inquiry_ && inquiry_->open.erase(node.rank) > 0) {
    for (const Json& one : message.at("workers")) {
      auto worker = one.get<WorkerState>();
      if (is_of(node, worker.rank)) inquiry_->workers.push_back(std::move(worker));
    }
    if (inquiry_->open.empty()) conclude_inquiry();
  }
  if (type == "ask_all_records") {
    if (state_ != State::kRunning) return send_records(node, {});
    if (!collection_) ask_for_records("as it is now", /*ends_attempt=*/false);
    collection_->asking.insert(node.rank);
  }
  const bool is_answer = (type == "record" || type == "records") && collection_ &&
                         collection_->open.contains(node.rank) &&
                         message.at("question") == collection_->number;
  if (is_answer && type == "record") keep_record(node, message);
  if (is_answer && type == "records") {
    collection_->open.erase(node.rank);
    collection_->sent.insert(node.rank);
  }
}

void Coordinator::hello(PeerLauncher& node, const Hello& hello) {
  if (options_.is_check && !hello.is_check && state_ == State::kFinished) {
    node.channel.fail(ECONNRESET);  // it comes for the job, which will listen here after this check
    return;
  }
  const std::string why = mismatch(node, hello);
  if (!why.empty()) {
    node.refuse(base::kExitUsage, why);
    if (state_ == State::kJoining) note_stranger("refused a launcher: " + why);
    return;
  }
  if (hello.exit_code != base::kExitOk) {
    node.refuse(hello.exit_code, hello.what);
    return end_job(hello.exit_code,
                   fmt::format("node {} ({}): {}", hello.node, hello.host, hello.what));
  }
  node.rank = rank_for(hello.node, hello.leads);
  node.hello = hello;
  peers_.register_node(node);
  welcome(node);
}

void Coordinator::welcome(PeerLauncher& node) {
  peers_.send(node, {{"type", "welcome"},
                     {"alive_ms", options_.alive_period.count()},
                     {"silence_ms", options_.silence().count()}});
  if (state_ == State::kFinished) return send_finish(node);
  if (state_ == State::kJoining) return start_when_complete();
  if (failed_ || !node_change_.empty()) return;  // it takes part in the next attempt
  if (peers_.any_ended() || taking_part() >= options_.nnodes.max) {
    peers_.send(node, {{"type", "waiting"},
                       {"message", fmt::format("the job runs on {} without this one, which "
                                               "stands by",
                                               base::counted(taking_part(), "node"))}});
    return;
  }
  change_nodes(node.name() + " has joined");
}

int Coordinator::rank_for(int wanted, bool leads) const {
  if (wanted >= 0) return wanted;
  // Rank 0 is the node with the store.
  int rank = leads ? 0 : 1;
  while (is_here(rank)) ++rank;
  return rank;
}

std::string Coordinator::mismatch(const PeerLauncher& node, const Hello& hello) const {
  if (node.rank >= 0) return "a launcher sent two hellos";
  if (excludes(hello.host) && present() >= options_.nnodes.min) return exclusion(hello.host);
  if (hello.job != options_.run_id) {
    return fmt::format("{} belongs to job '{}' (--rdzv_id), and the job at {}:{} is '{}'",
                       hello.host, hello.job, options_.master_addr, master_port_, options_.run_id);
  }
  const std::string nodes = options_.nnodes.str();
  if (hello.nodes != nodes) {
    return fmt::format("{} was started with --nnodes={}, and node 0 with --nnodes={}", hello.host,
                       hello.nodes, nodes);
  }
  if (hello.max_restarts != options_.max_restarts) {
    return fmt::format("{} was started with --max_restarts={}, and node 0 with --max_restarts={}",
                       hello.host, hello.max_restarts, options_.max_restarts);
  }
  if (hello.is_check != options_.is_check) {
    return fmt::format("{} was started with{} --preflight, and node 0 with{}", hello.host,
                       hello.is_check ? "" : "out", hello.is_check ? "out it" : " it");
  }
  if (hello.node >= options_.nnodes.max || hello.nproc < 1 || hello.nproc > kMaxWorkers) {
    return fmt::format("{} claims to be node {} with {}", hello.host, hello.node,
                       base::counted(hello.nproc, "worker"));
  }
  if (const auto other = peers_.nodes().find(hello.node); other != peers_.nodes().end()) {
    return fmt::format("two launchers have --node_rank={}: one on {} and one on {}", hello.node,
                       other->second->hello.host, hello.host);
  }
  if (hello.exit_code != base::kExitOk && !is_failure_code(hello.exit_code)) {
    return fmt::format("{} reported the exit code {} as a failure", hello.host, hello.exit_code);
  }
  if (torchrun_nodes_.has(hello.node)) {
    return fmt::format("{} has --node_rank={}, and so has a torchrun of this job", hello.host,
                       hello.node);
  }
  const bool has_begun = state_ == State::kRunning || state_ == State::kLeaving;
  if (has_begun && !options_.nodes_may_change()) return "the job has begun without this launcher";
  return "";
}

void Coordinator::end_job(int exit_code, const std::string& text) {
  // No workers run.
  if (state_ == State::kJoining || state_ == State::kLeaving)
    return finish({.exit_code = exit_code, .text = text});
  node_change_.clear();
  // The signal ends the job; the failure would only have restarted it.
  if (failed_ && failure_.may_restart) failure_ = {.exit_code = exit_code, .text = text};
  over_ = true;
  fail({.exit_code = exit_code, .text = text});
}

void Coordinator::pause() {
  peers_.send_to_nodes({{"type", "pause"}});
}

void Coordinator::lost(PeerLauncher& node) {
  const std::string name = node.name();
  const std::string host = node.hello.host;
  const bool takes_part = node.takes_part;
  const bool has_left = node.leaving || node.ended;
  if (node.excluded) node.refuse(base::kExitUnavailable, exclusion(host));
  if (collection_) collection_->open.erase(node.rank);
  peers_.remove(node.rank);
  const std::string gone = fmt::format("the launcher of {} is gone", name);
  if (state_ == State::kJoining) {
    const bool was_needed = attempt_ > 0 && takes_part && !options_.nodes_may_change();
    if (was_needed) return finish({.exit_code = base::kExitUnavailable, .text = gone});
    return start_when_complete();  // it may join again
  }
  if (state_ != State::kRunning || !takes_part) return;
  if (!has_left) ++failures_[host];
  // Its keeper kills its workers. If they have already succeeded, nothing is lost.
  if (!has_left && !is_ending_attempt()) wants_records_ = true;
  if (!has_left && options_.nodes_may_change()) change_nodes(name + " is lost");
  if (!has_left && !options_.nodes_may_change()) {
    fail({.exit_code = base::kExitUnavailable, .text = gone});
  }
  if (peers_.all_ended()) end_attempt();
}

bool Coordinator::is_here(int node) const {
  return peers_.nodes().contains(node) || torchrun_nodes_.has(node);
}

bool Coordinator::admits(int client) const {
  const std::string address = base::peer_address(client);
  if (options_.token.empty() || address == base::peer_address(client, /*own=*/true)) return true;
  return std::ranges::any_of(peers_.nodes(), [&address](const auto& one) {
    return one.second->address == address ||
           std::ranges::count(one.second->hello.addresses, address) > 0;
  });
}

void Coordinator::note_stranger(const std::string& text) {
  constexpr int kMaxNotes = 20;
  if (++strangers_noted_ < kMaxNotes) notices_.push_back(text);
  if (strangers_noted_ == kMaxNotes) notices_.push_back(text + " (further ones are not shown)");
}

void Coordinator::leave_torchruns_barrier() {
  using Barrier = TorchrunNodes::Barrier;
  const Barrier barrier = torchrun_nodes_.barrier();
  if (barrier == Barrier::kLeft) return finish({});
  if (barrier == Barrier::kOccupied) return;
  finish({.exit_code = base::kExitUnavailable,
          .text = "a node that torchrun runs left before its workers had succeeded"});
}

void Coordinator::inquire() {
  if (inquiry_) return;
  inquiry_ = Inquiry{.deadline = Clock::now() + kInquiryPatience};
  for (const auto& [rank, node] : peers_.nodes()) {
    if (node->takes_part) inquiry_->open.insert(rank);
  }
  peers_.send_to_nodes({{"type", "inquire"}});
}

void Coordinator::conclude_inquiry() {
  Inquiry inquiry = *std::exchange(inquiry_, std::nullopt);
  std::ranges::sort(inquiry.workers, {}, &WorkerState::rank);
  for (const int rank : inquiry.asking) {
    if (peers_.nodes().contains(rank)) send_status(*peers_.nodes().at(rank), inquiry);
  }
  const bool is_ending = state_ != State::kRunning || failed_ || !node_change_.empty();
  // A launcher that does not answer is stopped or lost, which the heartbeats will show.
  if (is_ending || !inquiry.open.empty()) return;
  if (inquiry.compares_speed) {
    for (const std::string& line : stragglers_.add(inquiry.workers)) notices_.push_back(line);
  }
  if (!inquiry.no_progress) return;
  const bool is_paused = std::ranges::any_of(
      peers_.nodes(), [](const auto& one) { return one.second->takes_part && one.second->paused; });
  if (is_paused) return peers_.send_to_nodes({{"type", "hold"}});
  const auto hang = judge_hang(inquiry.workers, *inquiry.no_progress, inquiry.ends_culprit);
  if (hang) peers_.send_to_nodes({{"type", "hang"}, {"hang", *hang}});
}

void Coordinator::send_status(PeerLauncher& node, const Inquiry& inquiry) {
  constexpr size_t kFrame = size_t{4} << 10;  // bytes of the rest of the message
  Json silent = Json::array();
  for (const int rank : inquiry.open) {
    if (!peers_.nodes().contains(rank)) continue;
    silent.push_back(peers_.nodes().at(rank)->name() + " does not answer");
  }
  const size_t used = json_line(silent).size() + kFrame;
  const size_t room = Peers::room(node);
  Json workers = json_of(inquiry.workers, room - std::min(used, room));
  if (workers.size() < inquiry.workers.size()) {
    silent.push_back(fmt::format("{} of {} are not shown: node 0 cannot send so much at once",
                                 inquiry.workers.size() - workers.size(),
                                 base::counted(std::ssize(inquiry.workers), "worker")));
  }
  const Json status{
      {"type", "status"}, {"workers", std::move(workers)}, {"silent", std::move(silent)}};
  peers_.send(node, status);
}

void Coordinator::ask_for_records(const std::string& why, bool ends_attempt) {
  collection_ = Collection{.number = ++collections_,
                           .deadline = Clock::now() + kRecordPatience,
                           .ends_attempt = ends_attempt,
                           .records = {.file = {.job = job_id_,
                                                .attempt = attempt_,
                                                .world_size = world_size_,
                                                .why = why,
                                                .has_all_nodes = true}}};
  for (const auto& [rank, node] : peers_.nodes()) {
    if (!node->takes_part) continue;
    collection_->open.insert(rank);
    peers_.send(*node, {{"type", "ask_records"}, {"question", collection_->number}});
  }
}

bool Coordinator::is_of(const PeerLauncher& node, int rank) const {
  const auto part = parts_.find(node.rank);
  return part != parts_.end() && rank >= part->second.first &&
         rank - part->second.first < part->second.count;
}

void Coordinator::keep_record(const PeerLauncher& node, const Json& message) {
  const int rank = message.at("rank");
  if (!is_of(node, rank) || collection_->records.messages.contains(rank)) return;
  std::string text = message.dump();
  if (text.size() > RecordQuota::of(world_size_).bytes) return;
  collection_->records.messages.emplace(rank, std::move(text));
}

void Coordinator::conclude_collection() {
  Collection collection = *std::exchange(collection_, std::nullopt);
  for (const auto& [rank, part] : parts_) {
    if (collection.sent.contains(rank)) continue;
    FlightFile::Missing& missing = collection.records.file.missing.emplace_back();
    missing.node = part.node;
    for (int i = 0; i < part.count; ++i) {
      const int worker = part.first + i;
      if (!collection.records.messages.contains(worker)) missing.ranks.push_back(worker);
    }
    missing.why =
        collection.open.contains(rank)
            ? fmt::format("it did not send them within {}", base::format_seconds(kRecordPatience))
            : "its launcher is gone";
  }
  for (const int rank : collection.asking) {
    const auto node = peers_.nodes().find(rank);
    if (node != peers_.nodes().end()) send_records(*node->second, collection.records);
  }
  if (collection.ends_attempt) records_ = std::move(collection.records);
}

void Coordinator::send_records(PeerLauncher& node, const JobRecords& records) {
  Json head = records.file;
  head["type"] = "all_records";
  std::vector<int> left_out;
  for (const auto& [rank, text] : records.messages) {
    if (!peers_.send_if_room(node, text)) left_out.push_back(rank);
  }
  if (!left_out.empty()) {
    head["missing"].push_back(
        FlightFile::Missing{"all nodes", left_out, "node 0 cannot send so much at once"});
  }
  peers_.send(node, head);
}

void Coordinator::handle_times() {
  const auto now = Clock::now();
  if (collection_ && (collection_->open.empty() || now >= collection_->deadline)) {
    collection_->ends_attempt ? end_attempt() : conclude_collection();
  }
  if (inquiry_ && now >= inquiry_->deadline) conclude_inquiry();
  if (end_by_ && now >= *end_by_) {
    end_by_.reset();
    for (const auto& [rank, node] : peers_.nodes()) {
      if (!node->takes_part || node->ended) continue;
      if (node->paused) {
        end_by_ = now + kEndPatience;
        continue;
      }
      notices_.push_back(node->name() + ": its workers have not ended in time; it counts as lost");
      node->refuse(base::kExitUnavailable, "its workers have not ended in time");
    }
  }
  const bool compares = state_ == State::kRunning && options_.straggler_interval.count() > 0;
  if (compares && now >= next_comparison_) {
    next_comparison_ = now + options_.straggler_interval;
    inquire();
    inquiry_->compares_speed = true;
  }
  if (restart_at_ && now >= *restart_at_) {
    restart_at_.reset();
    if (state_ == State::kJoining && present() >= options_.nnodes.min) start_attempt();
  }
  if (state_ == State::kJoining && last_call_ && now >= *last_call_) start_attempt();
  if (state_ == State::kJoining && !last_call_ && now >= join_deadline_) {
    finish({.exit_code = base::kExitUnavailable,
            .text = fmt::format("{} did not arrive within {} (--rdzv_conf=join_timeout=SECONDS)",
                                missing(), base::format_seconds(options_.join_timeout))});
  }
  if (state_ == State::kJoining && now >= next_notice_) {
    next_notice_ = now + kNoticePeriod;
    peers_.send_to_nodes(
        {{"type", "waiting"}, {"message", fmt::format("waiting for {}", missing())}});
  }
  if (now >= next_alive_) {
    next_alive_ = now + options_.alive_period;
    peers_.send_to_nodes({{"type", "alive"}});
  }
  due_ = next_alive_;
  if (restart_at_) due_ = std::min(due_, *restart_at_);
  if (end_by_) due_ = std::min(due_, *end_by_);
  if (inquiry_) due_ = std::min(due_, inquiry_->deadline);
  if (collection_) due_ = std::min(due_, collection_->deadline);
  if (compares) due_ = std::min(due_, next_comparison_);
  const auto barrier = torchrun_nodes_.barrier_deadline();
  if (state_ == State::kLeaving && barrier) due_ = std::min(due_, *barrier);
  if (state_ != State::kJoining) return;
  due_ = std::min({due_, next_notice_, last_call_.value_or(join_deadline_)});
}

std::string Coordinator::missing() const {
  if (options_.c10d) {
    const int here = present();
    const int wanted = last_call_ ? options_.nnodes.max : options_.nnodes.min;
    return fmt::format("{} ({} here, --nnodes={})", base::counted(wanted - here, "more node"), here,
                       options_.nnodes.str());
  }
  std::vector<std::string> names;
  for (int rank = 0; rank < options_.nnodes.max; ++rank) {
    if (!is_here(rank)) names.push_back(std::to_string(rank));
  }
  constexpr size_t kNamed = 16;
  const char* const ending = names.size() == 1 ? "" : "s";
  std::string rest;
  if (names.size() > kNamed) {
    rest = fmt::format(" and {} more", names.size() - kNamed);
    names.resize(kNamed);
  }
  return fmt::format("node{} {}{}", ending, base::join(names, ", "), rest);
}

int Coordinator::present() const {
  return peers_.present() + static_cast<int>(torchrun_nodes_.all().size());
}

int Coordinator::taking_part() const {
  return peers_.taking_part() + static_cast<int>(torchrun_nodes_.all().size());
}

void Coordinator::start_when_complete() {
  if (restart_at_) return;
  const int here = present();
  if (here >= options_.nnodes.max) return start_attempt();
  if (here < options_.nnodes.min) return last_call_.reset();
  if (!last_call_) last_call_ = Clock::now() + options_.last_call;
}

void Coordinator::start_attempt() {
  if (inquiry_) conclude_inquiry();  // about the last attempt: only `status` gets an answer
  state_ = State::kRunning;
  if (attempt_ == 0) joined_ = Clock::now();
  policy_.attempt_started(Clock::now());
  stragglers_ = StragglerWatch(options_.straggler_interval);
  next_comparison_ = Clock::now() + options_.straggler_interval;
  failed_ = wants_records_ = false;
  parts_.clear();
  node_change_.clear();
  last_call_.reset();
  peers_.choose(options_.nnodes.max - static_cast<int>(torchrun_nodes_.all().size()));
  // In the first attempt the store has the keys of torchrun's nodes.
  if (attempt_ > 0) store_.clear();
  if (!shares_store()) workers_port_ = hold_port(0);
  std::map<int, TorchrunRole> all = torchrun_nodes_.all();
  for (const auto& [rank, node] : peers_.nodes()) {
    if (node->takes_part) all[rank] = {node->hello.role, rank, node->hello.nproc};
  }
  int index = 0;
  for (const auto& [rank, ranks] : assign_ranks(all)) start_node(rank, index++, ranks);
}

void Coordinator::start_node(int rank, int index, const AssignedRanks& ranks) {
  if (torchrun_nodes_.has(rank)) return torchrun_nodes_.assign(rank, ranks);
  PeerLauncher& node = *peers_.nodes().at(rank);
  node.ended = false;
  world_size_ = ranks.world_size;
  parts_[rank] = {.node = node.name(), .first = ranks.base, .count = node.hello.nproc};
  Json start = Assignment{.master_addr = options_.master_addr,
                          .master_port = workers_port_ ? workers_port_->port() : master_port_,
                          .job_id = job_id_,
                          .agent_store = shares_store(),
                          .attempt = attempt_,
                          .restart_count = restarts_,
                          .reason = reason_,
                          .node = index,
                          .nodes = taking_part(),
                          .ranks = ranks};
  start["type"] = "start";
  peers_.send(node, start);
}

void Coordinator::change_nodes(const std::string& text) {
  if (state_ != State::kRunning || over_ || !node_change_.empty()) return;
  // An earlier failure is a consequence: workers often notice a lost node first.
  node_change_ = text;
  if (!failed_) stop_attempt(text);
}

void Coordinator::fail(const Failure& failure) {
  // Later failures follow from the first one, or from the change of nodes.
  if (failed_ || !node_change_.empty()) return;
  // A worker that no restart helps has said what was wrong. After a signal, nobody would look for
  // the file without a folder that the user has asked for.
  wants_records_ = wants_records_ || failure.may_restart || !options_.log_dir.empty();
  if (failure.may_restart && leaves_out(failure.node, failure.text)) return;
  failed_ = true;
  failure_ = failure;
  policy_.failed(failure.cause, Clock::now());
  const std::string refusal = policy_.refusal();
  failure_.may_restart = failure.may_restart && refusal.empty() && torchrun_nodes_.all().empty();
  if (failure.may_restart && options_.max_restarts > 0 && !refusal.empty()) {
    notices_.push_back(refusal);
  }
  stop_attempt(failure.text);
}

bool Coordinator::excludes(const std::string& host) const {
  const auto found = failures_.find(host);
  return options_.exclude_failing > 0 && found != failures_.end() &&
         found->second >= options_.exclude_failing;
}

std::string Coordinator::exclusion(const std::string& host) const {
  return fmt::format(
      "{} has failed {} in this job, which goes on without it (--exclude_failing={})", host,
      base::counted(failures_.at(host), "time"), options_.exclude_failing);
}

// Returns whether the job goes on without the node whose worker has failed.
bool Coordinator::leaves_out(int rank, const std::string& text) {
  const auto found = peers_.nodes().find(rank);
  if (found == peers_.nodes().end()) return false;
  PeerLauncher& node = *found->second;
  ++failures_[node.hello.host];
  // Node 0 leads.
  if (!excludes(node.hello.host) || rank == 0 || present() <= options_.nnodes.min) return false;
  node.leaving = node.excluded = true;
  change_nodes(
      fmt::format("{} is left out: {}; {}", node.name(), text, exclusion(node.hello.host)));
  return true;
}

void Coordinator::stop_attempt(const std::string& text) {
  end_by_ = Clock::now() + options_.shutdown_timeout + kEndPatience;
  peers_.send_to_nodes(
      {{"type", "stop"}, {"attempt", attempt_}, {"failed", failed_ && !over_}, {"what", text}});
}

void Coordinator::end_attempt() {
  end_by_.reset();
  if (collection_ && !collection_->ends_attempt) conclude_collection();
  if (std::exchange(wants_records_, false)) {
    ask_for_records(failed_ ? failure_.text : node_change_, /*ends_attempt=*/true);
  }
  if (collection_) {
    if (!collection_->open.empty() && Clock::now() < collection_->deadline) return;
    conclude_collection();
  }
  if (!node_change_.empty()) return start_again(node_change_);
  if (!failed_ && torchrun_nodes_.all().empty()) return finish({});
  if (!failed_) {
    state_ = State::kLeaving;
    torchrun_nodes_.enter_barrier(peers_.nodes().size());
    return leave_torchruns_barrier();
  }
  const bool can_restart = options_.nodes_may_change() || present() == options_.nnodes.max;
  if (!failure_.may_restart || !can_restart) return finish(failure_);
  ++restarts_;
  const auto delay = policy_.restart();
  if (delay.count() > 0) restart_at_ = Clock::now() + delay;
  start_again(failure_.text);
}

void Coordinator::start_again(const std::string& reason) {
  ++attempt_;
  reason_ = reason;
  failure_.node = -1;
  state_ = State::kJoining;
  // Until restart_at_, nobody waits for nodes.
  const auto begin = restart_at_.value_or(Clock::now());
  join_deadline_ = begin + options_.join_timeout;
  next_notice_ = begin;
  // Does not wait for more nodes than the minimum.
  if (!restart_at_ && present() >= options_.nnodes.min) start_attempt();
}

void Coordinator::finish(const Failure& result) {
  state_ = State::kFinished;
  failure_ = result;
  for (const auto& [rank, node] : peers_.nodes()) send_finish(*node);
}

void Coordinator::send_finish(PeerLauncher& node) {
  peers_.send(node, {{"type", "finish"},
                     {"exit_code", failure_.exit_code},
                     {"what", failure_.text},
                     {"yours", node.rank == failure_.node}});
}

}  // namespace syncbn::launch
