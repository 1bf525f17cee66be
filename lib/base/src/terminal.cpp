#include <syncbn/base/terminal.h>

#include <sys/ioctl.h>
#include <unistd.h>

namespace syncbn::base {

int terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace syncbn::base
