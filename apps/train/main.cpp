#include <syncbn/base/log.h>
#include <syncbn/train/command.h>

#include <string>
#include <vector>

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  return syncbn::base::run_main("train", [&] { return syncbn::train::run_command(args); });
}
