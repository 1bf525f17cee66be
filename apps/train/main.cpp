#include <syncbn/train/command.h>
#include <sys/prctl.h>

#include <cerrno>

int main(int argc, char** argv) {
  // The name in top, pgrep and messages: users start bin/train.
  static char name[] = "train";
  ::prctl(PR_SET_NAME, name);
  program_invocation_short_name = name;
  return syncbn::train::run_main(argc, argv);
}
