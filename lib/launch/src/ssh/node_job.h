#pragma once

#include <syncbn/launch/options.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// The only argument of a node's launcher. The head sends the rest through stdin, past all shells.
inline constexpr const char* kFromHead = "--from_head";

/// The head's first message to a node's launcher. Head and node exchange lines of JSON, objects
/// with a "type":
///
///   head → node, its stdin     job · go (master_port) · signal · alive
///   node → head, its stderr    problem, or ready · ended (NodeMessage)
///
/// A node's message begins with the job's mark, which workers do not know. All other lines are the
/// workers'.
struct NodeJob {
  std::string version;  ///< of the head
  std::string mark;
  std::string folder;  ///< to run in
  Variables environment = {};
  std::vector<std::string> words = {};  ///< of the node's command line
  bool speaks_for_all = false;          ///< MessageScope::kWholeJob
  Streams colours = {};                 ///< LaunchOptions::colours

  /// Words and values may hold any bytes.
  nlohmann::json to_json() const;
  /// From a head of another version, reads only version and mark. @throws nlohmann's exceptions.
  static NodeJob from_json(const nlohmann::json& message);
};

/// A message from a node to its head: one line for NodeLines.
std::string marked_line(const std::string& mark, const nlohmann::json& message);

}  // namespace syncbn::launch
