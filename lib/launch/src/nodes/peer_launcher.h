#pragma once

#include <syncbn/base/channel.h>

#include <chrono>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace syncbn::launch {

/// A launcher of the job, as the coordinator sees it: the connection and the state of its node.
struct PeerLauncher {
  using Clock = std::chrono::steady_clock;

  explicit PeerLauncher(base::Channel connection) : channel(std::move(connection)) {}

  base::Channel channel;
  bool greeted = false;
  int rank = -1;  ///< of the node; -1: it has not sent its hello
  int nproc = 0;
  std::string host;
  std::string role;
  bool takes_part = false;  ///< in this attempt
  bool ended = false;       ///< its workers, in this attempt
  bool leaving = false;     ///< it ends, and the others do not
  bool paused = false;      ///< stopped, as by Ctrl-Z
  Clock::time_point heard = Clock::now();

  std::string name() const;

  /// Sends and reads what is possible now, and hands each message to `sink`. Refuses a peer of
  /// another version, and one whose message makes `sink` throw nlohmann's exceptions.
  void handle(const std::function<void(const nlohmann::json&)>& sink);
  void refuse(int exit_code, const std::string& why);
};

}  // namespace syncbn::launch
