#include <syncbn/base/terminal.h>

#include <sys/ioctl.h>
#include <unistd.h>

namespace syncbn::base {

int terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string truncated(std::string text, int columns) {
  int seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins_character = (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
    if (begins_character && seen++ == columns) {
      text.resize(i);
      break;
    }
  }
  return text;
}

}  // namespace syncbn::base
