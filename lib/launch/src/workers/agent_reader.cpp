#include "workers/agent_reader.h"

#include <cstring>

namespace syncbn::launch {
namespace {

std::string_view magic() {
  static const uint32_t number = SYNCBN_AGENT_MAGIC;
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

// A worker's text goes to the terminal: it must not carry escape sequences.
void make_printable(syncbn_agent_record& record) {
  record.text[sizeof(record.text) - 1] = '\0';
  for (char* c = record.text; *c != '\0'; ++c) {
    if (static_cast<unsigned char>(*c) < ' ' || *c == '\x7f') *c = ' ';
  }
}

}  // namespace

void AgentReader::feed(std::string_view bytes, const Sink& sink) {
  pending_.append(bytes);
  size_t at = 0;
  while (pending_.size() - at >= sizeof(syncbn_agent_record)) {
    const size_t found = pending_.find(magic(), at);
    if (found == std::string::npos) {
      // Its first bytes may be there already.
      at = pending_.size() - (magic().size() - 1);
      break;
    }
    at = found;
    if (pending_.size() - at < sizeof(syncbn_agent_record)) break;
    syncbn_agent_record record;
    std::memcpy(&record, pending_.data() + at, sizeof(record));
    if (record.version != SYNCBN_AGENT_VERSION) {
      at += magic().size();
      continue;
    }
    at += sizeof(record);
    make_printable(record);
    sink(record);
  }
  pending_.erase(0, at);
}

}  // namespace syncbn::launch
