// For each line of its input, sets the damaged checkpoints in RUN_DIR aside with a warning, as a
// start of `train` would, and prints the one from which the run resumes. scripts/fault-test damages
// a checkpoint 1,100 times; starting `train` as often would take 40 minutes. Usage: resume_finder
// RUN_DIR
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/config.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "checkpoints/keepers.h"
#include "checkpoints/resume.h"

namespace {

void answer(const syncbn::train::Config& config) {
  using namespace syncbn::train;
  try {
    const Keepers keepers(/*of_each_node=*/false, config.run_dir);
    std::cout << find_resume_state(config, "digits", keepers).checkpoint_path << std::endl;
  } catch (const syncbn::base::UserError& error) {
    std::cout << "error: " << error.what() << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw syncbn::base::UserError("usage: resume_finder RUN_DIR");
    syncbn::dist::init_process_group();
    syncbn::train::Config config;
    config.run_dir = argv[1];
    config.resume = "auto";
    for (std::string line; std::getline(std::cin, line);) answer(config);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
}
