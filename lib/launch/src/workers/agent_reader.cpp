#include "workers/agent_reader.h"

#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <cstring>

namespace syncbn::launch {
namespace {

// The text goes to the terminal. Returns whether it is as it was sent.
bool make_printable(syncbn_agent_record& record) {
  constexpr size_t kMaxLength = sizeof(record.text) - 1;
  const std::string sent(record.text, ::strnlen(record.text, kMaxLength));
  std::string line = sent;
  std::ranges::replace_if(
      line, [](unsigned char c) { return std::isspace(c) != 0; }, ' ');
  const std::string text = base::printable(line);
  const std::string_view kept = base::utf8_prefix(text, kMaxLength);
  std::memset(record.text, 0, sizeof(record.text));
  kept.copy(record.text, kMaxLength);
  return kept == sent;
}

}  // namespace

void AgentReader::feed(std::string_view bytes, const Sink& sink) {
  static const uint32_t number = SYNCBN_AGENT_MAGIC;
  const std::string_view magic(reinterpret_cast<const char*>(&number), sizeof(number));
  pending_.append(bytes);
  size_t done = 0;
  syncbn_agent_record record;
  while (pending_.size() - done >= sizeof(record)) {
    done = pending_.find(magic, done);
    if (done == std::string::npos) {
      // The last bytes may be the beginning of a magic number.
      done = pending_.size() - (magic.size() - 1);
      break;
    }
    if (pending_.size() - done < sizeof(record)) break;
    std::memcpy(&record, pending_.data() + done, sizeof(record));
    const bool readable = record.version == SYNCBN_AGENT_VERSION;
    done += readable ? sizeof(record) : magic.size();
    if (!readable) continue;
    if (record.kind == SYNCBN_AGENT_LOG) {  // opened, and never shown
      record.text[sizeof(record.text) - 1] = '\0';
    } else if (!make_printable(record) && record.kind == SYNCBN_AGENT_RESUME) {
      continue;  // another command
    }
    sink(record);
  }
  pending_.erase(0, done);
}

}  // namespace syncbn::launch
