#include "monitor/annotated_work.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include "monitor/plain_message.h"

namespace syncbn::dist::detail {
namespace {

/// The message of the exception being handled, without libtorch's stack frames and Gloo's source
/// lines.
std::string reason() {
  std::string text;
  try {
    throw;
  } catch (const std::exception& error) {
    text = plain_message(error);
  }
  const size_t place = text.starts_with("[/") ? text.find("] ") : std::string::npos;
  return place == std::string::npos ? text : text.substr(place + 2);
}

}  // namespace

std::string Label::subject() const {
  const std::string peer =
      call.is_collective()
          ? ""
          : fmt::format(" {} rank {}", call.type == c10d::OpType::SEND ? "to" : "from", call.peer);
  return fmt::format("{} #{}{} of group '{}'", call.name, call.sequence, peer, log->group());
}

void Label::rethrow() const {
  const std::string why = reason();
  log->fail(call);
  PeerMonitor::Cause cause;
  if (const auto alive = monitor.lock()) cause = alive->cause_of(*log, call, why);
  const std::string failed = fmt::format("rank {} of {} on {}: {} failed: ", rank, world_size,
                                         base::hostname(), subject());
  if (cause.ranks_disagree) {
    throw base::UserError(
        fmt::format("{}the ranks called different things: {}; every rank of a group calls the same "
                    "collectives in the same order, with tensors of the same dtype and sizes",
                    failed, cause.text));
  }
  if (!cause.text.empty()) {
    throw base::UnavailableError(
        fmt::format("{}{}. That rank's own message, if any, says why", failed, cause.text));
  }
  throw base::UnavailableError(fmt::format(
      "{}{}. Another rank probably ended or is stuck: its own message, if any, says why", failed,
      why));
}

void Label::rethrow_refusal() const {
  throw base::UserError(
      fmt::format("rank {} of {}: {} was refused: {}", rank, world_size, subject(), reason()));
}

AnnotatedWork::AnnotatedWork(Label label, c10::intrusive_ptr<c10d::Work> inner, bool by_gloo)
    : c10d::Work(label.rank, label.call.type),
      label_(std::move(label)),
      inner_(std::move(inner)),
      by_gloo_(by_gloo) {}

bool AnnotatedWork::wait(std::chrono::milliseconds timeout) {
  try {
    const bool done = inner_->wait(timeout);
    label_.log->succeed(label_.call);
    return done;
  } catch (...) {
    label_.rethrow();
  }
}

// DDP's reducer waits for this future, not for the work. NCCL's future carries streams, which
// then() would lose, so it is returned unchanged.
c10::intrusive_ptr<c10::ivalue::Future> AnnotatedWork::getFuture() {
  auto future = inner_->getFuture();
  if (!by_gloo_) return future;
  return future->then(
      [label = label_](c10::ivalue::Future& done) {
        if (done.hasError()) {
          try {
            std::rethrow_exception(done.exception_ptr());
          } catch (...) {
            label.rethrow();
          }
        }
        label.log->succeed(label.call);
        return done.value();
      },
      future->elementType());
}

}  // namespace syncbn::dist::detail
