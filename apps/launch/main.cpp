#include <syncbn/base/log.h>
#include <syncbn/launch/launch.h>

int main(int argc, char** argv) {
  return syncbn::base::run_main("syncbn-launch",
                                [&] { return syncbn::launch::launch(argc, argv); });
}
