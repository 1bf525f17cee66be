#pragma once

#include <syncbn/base/socket.h>

#include <string>
#include <thread>
#include <utility>

#include "common/descriptors.h"

namespace syncbn::launch {

/// The passive end of a measured connection: answers one node in a thread of its own. Ends with
/// this object, at the latest after the deadline.
class LinkServer {
 public:
  /// @param id that the other end has to send first; others are turned away.
  /// @throws base::UnavailableError if there is no port.
  LinkServer(std::string id, base::Deadline deadline);
  ~LinkServer();
  LinkServer(const LinkServer&) = delete;
  LinkServer& operator=(const LinkServer&) = delete;

  int port() const { return port_; }

 private:
  void serve();

  std::string id_;
  base::Deadline deadline_;
  base::UniqueFd listener_;
  Pipe stop_ = Pipe::make();  ///< its writer is closed to end the thread
  int port_ = 0;
  std::thread thread_;
};

/// Answers the probe at the other end of `fd` until it leaves or the deadline has passed.
void answer_probe(int fd, base::Deadline deadline);

/// The active end. Not thread-safe. Its calls throw base::UnavailableError when the connection
/// fails or the deadline has passed.
class LinkProbe {
 public:
  /// Connects to a LinkServer. The deadline holds for round trips as well.
  LinkProbe(const std::string& host, int port, const std::string& id, base::Deadline deadline);
  /// @param connection to answer_probe()
  LinkProbe(base::UniqueFd connection, base::Deadline deadline)
      : fd_(std::move(connection)), deadline_(deadline) {}

  struct Trip {
    double seconds = 0;      ///< the shortest round trip
    double clock_ahead = 0;  ///< seconds by which the other end's clock is ahead of this one's
  };
  /// As in NTP, the clock of the other end is read in the middle of the shortest round trip.
  Trip measure_trip();
  /// Bytes per second to the other end, measured for about a third of a second.
  double measure_rate(base::Deadline deadline);

 private:
  base::UniqueFd fd_;
  base::Deadline deadline_;
};

}  // namespace syncbn::launch
