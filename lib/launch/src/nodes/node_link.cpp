#include "nodes/node_link.h"

#include <syncbn/base/error.h>

namespace syncbn::launch {

std::optional<ToNode> NodeLink::next() {
  if (inbox_.empty()) return std::nullopt;
  ToNode message = std::move(inbox_.front());
  inbox_.pop_front();
  return message;
}

void NodeLink::report_record(int question, const RankMemory& rank) {
  const auto record = rank.read();
  if (!record) return;
  if (const auto message = record_message(*record, RecordQuota::of(record->world_size))) {
    send(Record{question, record->rank, json_line(*message)});
  }
}

void NodeLink::end(const JobFailure& failure) {
  if (finish_) return;
  finish_ = Finish{failure};
  add(Stop{failure.exit_code != base::kExitOk, failure});
}

}  // namespace syncbn::launch
