#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/base/unique_fd.h>

#include <string>

#include "launch/nodes.h"
#include "support/connection.h"
#include "support/eventually.h"

namespace syncbn::test {

/// The line with which launchers begin.
inline constexpr const char* kAgentGreeting = "syncbn-agent 6\n";

/// A launcher's message after its greeting. The values are JSON, except for the host, which is the
/// inner part of a JSON string.
inline std::string hello(const std::string& host, const std::string& node = "1",
                         const std::string& nproc = "1") {
  return fmt::format(R"({{"type":"hello","job":"none","node":{},"leads":false,"nodes":"2",)"
                     R"("nproc":{},"role":"default","host":"{}","max_restarts":0,)"
                     R"("exit_code":0,"what":"","addresses":[]}})"
                     "\n",
                     node, nproc, host);
}

/// Node 0 of two, whose worker runs until the file "go" exists, with a stranger as node 1.
struct JobWithStranger {
  explicit JobWithStranger(const std::string& host = "stranger", const Words& options = {})
      : lead(nodes.start(0, 1, options, until_go())), stranger(connect_to(nodes.port())) {
    EXPECT_TRUE(send_to(stranger, kAgentGreeting + hello(host)));
    EXPECT_TRUE(eventually([this] { return nodes.has("up0"); }));
  }

  Nodes nodes{2};
  Program& lead;
  base::UniqueFd stranger;
};

}  // namespace syncbn::test
