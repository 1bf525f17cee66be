#include "nodes/local_link.h"

#include <syncbn/base/error.h>

#include <exception>
#include <utility>

#include "nodes/master_port.h"

namespace syncbn::launch {

LocalLink::LocalLink(const LaunchOptions& options, const RunContext& context)
    : options_(options),
      master_port_(context.master_port),
      leader_(options, context.job_id, Clock::now()),
      master_addr_(context.master_addr),
      job_id_(context.job_id) {}

LocalLink::LocalLink(const LaunchOptions& options, const RunContext& context, base::HeldPort port)
    : LocalLink(options, context) {
  port_ = std::move(port);
  join("");
}

void LocalLink::join(const std::string& host) {
  const Hello hello{.node = options_.node_rank,
                    .nproc = options_.nproc_per_node,
                    .role = options_.role,
                    .host = host};
  own_ = leader_.rank_for(hello.node, /*leads=*/true);
  leader_.join(own_, hello, Clock::now());
  carry_out_commands();
}

void LocalLink::handle() {
  leader_.tick(Clock::now());
  carry_out_commands();
}

void LocalLink::send(const FromNode& message) {
  leader_.receive(own_, message, Clock::now());
  carry_out_commands();
}

void LocalLink::carry_out_commands() {
  for (auto& [node, message] : leader_.take_commands()) {
    if (Start* const start = std::get_if<Start>(&message)) {
      start->master_addr = master_addr_;
      start->job_id = job_id_;
      try {
        prepare(*start);
      } catch (const std::exception& error) {  // no port is free
        return end(base::exit_code_of(error), error.what());
      }
    }
    const bool is_here = node == own_ || node == LeaderCommand::kHere;
    if (!is_here) send_to(node, message);
    if (!is_here && node != LeaderCommand::kAll) continue;
    if (const Finish* const finish = std::get_if<Finish>(&message)) end(*finish);
    if (const Refuse* const left_out = std::get_if<Refuse>(&message)) {
      end(left_out->exit_code, left_out->message);
    }
    add(std::move(message));
  }
}

void LocalLink::prepare(Start& start) {
  // A fresh port, so that no worker of the last attempt can reach the new store.
  if (start.attempt > 0 && options_.master_port.value_or(0) == 0) port_ = hold_port(0);
  start.master_port = port_->port();
  start.reason.clear();  // the failure that this launcher has just reported
}

}  // namespace syncbn::launch
