#include <syncbn/train/command.h>

void register_own_experiment();

int main(int argc, char** argv) {
  return syncbn::train::run_main(argc, argv, register_own_experiment);
}
