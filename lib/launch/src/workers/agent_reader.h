#pragma once

#include <syncbn/agent.h>

#include <functional>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// Cuts what one worker sends over its agent channel into records. Whatever is no record (a
/// program may write to any descriptor it finds) is skipped up to the next magic number.
class AgentReader {
 public:
  /// The record's text ends with NUL and holds no control characters.
  using Sink = std::function<void(const syncbn_agent_record& record)>;

  void feed(std::string_view bytes, const Sink& sink);

 private:
  std::string pending_;
};

}  // namespace syncbn::launch
