#include "workers/agent_reader.h"

#include <cstring>

namespace syncbn::launch {
namespace {

// The text goes to the terminal, which would obey escape sequences.
void make_printable(syncbn_agent_record& record) {
  record.text[sizeof(record.text) - 1] = '\0';
  for (char* c = record.text; *c != '\0'; ++c) {
    if (static_cast<unsigned char>(*c) < ' ' || *c == '\x7f') *c = ' ';
  }
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
    make_printable(record);
    sink(record);
  }
  pending_.erase(0, done);
}

}  // namespace syncbn::launch
