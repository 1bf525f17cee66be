#include "monitor/monitor_message.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>

namespace syncbn::dist::detail {

std::string Message::line() const {
  std::string text = fmt::format("{}\t{}\t{}", from, to, type);
  for (std::string field : fields) {
    std::replace_if(
        field.begin(), field.end(), [](unsigned char c) { return c < ' '; }, ' ');
    text += '\t' + field;
  }
  return text + "\n";
}

std::optional<Message> Message::parse(const std::string& line) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = line.find('\t', begin);
    parts.push_back(line.substr(begin, end - begin));
  }
  if (parts.size() < 3) return std::nullopt;
  const auto from = base::parse_number<int>(parts[0]);
  const auto to = base::parse_number<int>(parts[1]);
  if (!from || !to) return std::nullopt;
  return Message{*from, *to, parts[2], {parts.begin() + 3, parts.end()}};
}

uint64_t Message::number(size_t index) const {
  return base::parse_number<uint64_t>(field(index)).value_or(0);
}

}  // namespace syncbn::dist::detail
