#include "workers/worker.h"

#include "common/processes.h"

namespace syncbn::launch {

std::string Worker::end_in_words() const {
  return wait_status ? describe_status(*wait_status) : "cannot be started";
}

}  // namespace syncbn::launch
