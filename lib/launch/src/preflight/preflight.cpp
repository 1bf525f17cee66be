#include "preflight/preflight.h"

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "common/json_messages.h"
#include "options/option_table.h"
#include "preflight/link_check.h"
#include "preflight/machine_figures.h"
#include "store/store_client.h"

namespace syncbn::launch {
namespace {

// Upper bounds on the time for all nodes to measure, and for each of the two measurements of a
// connection. These two add up to less, so that only the node whose connection hangs reports it.
constexpr std::chrono::seconds kMeasurePatience{90};
constexpr std::chrono::seconds kLinkPatience{20};

std::string text_variable(const char* name) {
  const auto value = base::env(name);
  if (!value)
    throw base::UserError(
        fmt::format("{} is not set: {} is the launcher's own", name, kPreflightWorker));
  return *value;
}

int integer_variable(const char* name) {
  return base::parse_number<int>(text_variable(name)).value_or(-1);
}

/// Exchanges the nodes' results over the store of the job.
class Exchange {
 public:
  Exchange(int node, int nodes)
      : node_(node),
        nodes_(nodes),
        deadline_(Clock::now() + kMeasurePatience),
        store_(StoreClient::connect(text_variable("MASTER_ADDR"), integer_variable("MASTER_PORT"),
                                    deadline_)) {
    store_.register_client(deadline_);
  }

  void publish(const std::string& name, const std::string& value) {
    store_.set(fmt::format("preflight/{}/{}", name, node_), value, deadline_);
  }

  std::string of(int node, const std::string& name) {
    return wait_for(fmt::format("preflight/{}/{}", name, node), fmt::format("node {}", node));
  }

  /// A barrier: returns when all nodes have called it.
  void meet(const std::string& name) {
    const std::string key = "preflight/" + name;
    if (store_.add(key, 1, deadline_) == nodes_) store_.set(key + "/all", "", deadline_);
    wait_for(key + "/all", "a node");
  }

  /// An address at which the other nodes reach this one.
  std::string own_address() const {
    return node_ == 0 ? text_variable("MASTER_ADDR")
                      : base::peer_address(store_.fd(), /*own=*/true);
  }

 private:
  std::string wait_for(const std::string& key, const std::string& whom) {
    store_.start_wait(key, deadline_);
    while (!store_.wait_done()) {
      if (!base::poll_until(store_.fd(), POLLIN, deadline_)) {
        throw base::UnavailableError(fmt::format("--preflight: {} did not answer within {}", whom,
                                                 base::format_seconds(kMeasurePatience)));
      }
    }
    return store_.get(key, deadline_);
  }

  const int node_;
  const int nodes_;
  const Clock::time_point deadline_;
  StoreClient store_;
};

// Each node measures the connection to the next one, all at the same time.
void measure_link(Exchange& exchange, int node, int nodes, MachineFigures& figures) {
  const std::string id = text_variable("SYNCBN_JOB_ID");
  const LinkServer server(id, Clock::now() + kMeasurePatience);
  exchange.publish("address", exchange.own_address());
  exchange.publish("port", std::to_string(server.port()));
  const int next = (node + 1) % nodes;
  const std::string host = exchange.of(next, "address");
  const int port = base::parse_number<int>(exchange.of(next, "port")).value_or(0);
  std::optional<LinkProbe> probe;
  const auto attempt = [&figures](const auto& measure) {
    try {
      if (figures.link_error.empty()) measure();
    } catch (const base::UnavailableError& error) {
      figures.link_error = error.what();
    }
  };
  attempt([&] {
    probe.emplace(host, port, id, Clock::now() + kLinkPatience);
    const LinkProbe::Trip trip = probe->measure_trip();
    figures.round_trip = trip.seconds;
    figures.clock_ahead = trip.clock_ahead;
  });
  exchange.meet("trips");
  attempt([&] { figures.link_rate = probe->measure_rate(Clock::now() + kLinkPatience); });
  exchange.meet("rates");
}

int report(const std::vector<MachineFigures>& nodes) {
  const PreflightFindings findings = judge(nodes);
  std::string text = table_of(nodes);
  for (const std::string& outlier : findings.outliers) text += "outlier: " + outlier + "\n";
  for (const std::string& failure : findings.failures) text += "failure: " + failure + "\n";
  if (findings.failures.empty() && findings.outliers.empty()) text += "no outlier\n";
  base::write_stdout(text);
  return findings.failures.empty() ? base::kExitOk : base::kExitUnavailable;
}

}  // namespace

LaunchOptions preflight_job(const LaunchOptions& options) {
  std::vector<std::string> words{options.called_as};
  std::ranges::copy_if(options.given, std::back_inserter(words),
                       [](const std::string& word) { return (tags_of(word) & kNotForCheck) == 0; });
  std::filesystem::path folder = std::filesystem::current_path() / options.log_dir;
  while (!base::exists(folder)) folder = folder.parent_path();  // the job makes what is missing
  words.insert(words.end(), {"--prefix=off", "--", "/proc/self/exe", kPreflightWorker, folder});
  if (!options.token.empty()) ::setenv("SYNCBN_TOKEN", options.token.c_str(), 1);
  LaunchOptions check = parse_settled_options(words);
  check.is_check = true;
  check.run_id += " --preflight";  // a node without the option belongs to another job
  return check;
}

int run_preflight_worker(const std::string& folder) {
  if (integer_variable("LOCAL_RANK") != 0) return base::kExitOk;
  const int node = integer_variable("GROUP_RANK");
  const int nodes = integer_variable("GROUP_WORLD_SIZE");
  if (nodes == 1) return report({measure_machine(folder)});
  Exchange exchange(node, nodes);
  MachineFigures figures = measure_machine(folder);
  exchange.meet("machines");
  measure_link(exchange, node, nodes, figures);
  exchange.publish("figures", nlohmann::json(figures).dump());
  if (node != 0) {
    exchange.of(0, "verdict");
    return base::kExitOk;
  }
  std::vector<MachineFigures> all;
  all.reserve(static_cast<size_t>(nodes));
  for (int one = 0; one < nodes; ++one) {
    all.push_back(parse_json(exchange.of(one, "figures")).get<MachineFigures>());
  }
  const int exit_code = report(all);
  exchange.publish("verdict", "");
  return exit_code;
}

}  // namespace syncbn::launch
