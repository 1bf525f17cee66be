#include "nodes/local_link.h"

#include <syncbn/base/error.h>
#include <syncbn/base/signal_name.h>

#include <utility>

#include "nodes/master_port.h"

namespace syncbn::launch {

LocalLink::LocalLink(const LaunchOptions& options, const RunContext& context, base::HeldPort port)
    : options_(options),
      master_addr_(context.master_addr),
      job_id_(context.job_id),
      port_(std::move(port)),
      leader_(options, job_id_, Clock::now()) {
  leader_.join(0, {.node = 0, .nproc = options.nproc_per_node, .role = options.role}, Clock::now());
  deliver();
}

void LocalLink::handle() {
  leader_.tick(Clock::now());
  deliver();
}

void LocalLink::send(const FromNode& message) {
  leader_.receive(0, message, Clock::now());
  deliver();
}

void LocalLink::report_signal(int signal) {
  leader_.end(base::kExitSignalBase + signal, "ended by " + base::signal_name(signal),
              Clock::now());
  deliver();
}

void LocalLink::deliver() {
  for (auto& [node, message] : leader_.take_commands()) {
    if (const Finish* const finish = std::get_if<Finish>(&message)) end(*finish);
    if (Start* const start = std::get_if<Start>(&message)) {
      // A fresh port, so that no worker of the last attempt can reach the new store.
      try {
        if (start->attempt > 0 && options_.master_port.value_or(0) == 0) port_ = hold_port(0);
      } catch (const std::exception& error) {
        return end(base::exit_code_of(error), error.what());
      }
      start->master_addr = master_addr_;
      start->master_port = port_.port();
      start->job_id = job_id_;
      start->reason.clear();  // the failure that this launcher has just reported
    }
    add(std::move(message));
  }
}

}  // namespace syncbn::launch
