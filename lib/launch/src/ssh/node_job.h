#pragma once

#include <syncbn/launch/options.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// The one word that a head starts the launcher of a node with; the rest goes over its stdin, where
/// no shell sees it.
inline constexpr const char* kFromHead = "--from_head";

/// What a head tells the launcher of a node first. Head and node talk in lines of JSON, objects
/// with a "type":
///
///   head → node, its stdin     job · go (master_port) · signal · alive
///   node → head, its stderr    problem, or ready · ended (NodeMessage)
///
/// What a node says begins with the job's mark, which workers do not know: theirs are the other
/// lines.
struct NodeJob {
  std::string version;  ///< of the head
  std::string mark;
  std::string folder;  ///< to run in
  Variables environment = {};
  std::vector<std::string> words = {};  ///< of the node's command line
  bool speaks_for_all = false;          ///< MessageScope::kWholeJob
  Streams colours = {};                 ///< LaunchOptions::colours

  /// Words and values may be any bytes.
  nlohmann::json to_json() const;
  /// Only version and mark are read where the version is another. @throws nlohmann's exceptions.
  static NodeJob from_json(const nlohmann::json& message);
};

/// A message from a node to its head: one line, as NodeLines reads it.
std::string marked_line(const std::string& mark, const nlohmann::json& message);

}  // namespace syncbn::launch
