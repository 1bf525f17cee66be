#pragma once

#include <syncbn/agent.h>

#include <functional>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// Splits what a worker writes to its agent channel into records. Other bytes, which a program may
/// write to any descriptor that it finds, are skipped up to the next magic number.
class AgentReader {
 public:
  /// The record's text ends with NUL and has no control characters.
  using Sink = std::function<void(const syncbn_agent_record& record)>;

  void feed(std::string_view bytes, const Sink& sink);

 private:
  std::string pending_;
};

}  // namespace syncbn::launch
