#include <syncbn/launch/options.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <memory>
#include <string_view>

#include "devices.h"

namespace syncbn::launch {
namespace {

constexpr const char* kUsage = "syncbn-launch [options] program [its arguments ...]";

constexpr const char* kExamples =
    R"(Everything after the program's name goes to the program. NAME.py runs as ${PYTHON_EXEC:-python3} -u;
another name without a slash is looked for beside syncbn-launch, then in PATH.

Examples:
  Four workers on this machine, with the trainer that stands beside syncbn-launch:
    syncbn-launch --standalone --nproc_per_node=4 train --config configs/digits.yaml
  One worker per GPU, with a Python script:
    syncbn-launch --nproc_per_node=gpu train.py --epochs 10
  The second of two machines, eight workers each:
    syncbn-launch --nnodes=2 --node_rank=1 --master_addr=node0 --nproc_per_node=8 train.py)";

bool is_flag(const CLI::Option& option) {
  return option.get_type_size() == 0 || option.get_expected_min() == 0;
}

// "  --nnodes N      Number of machines" + "(default 1, environment PET_NNODES)".
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(28); }

  std::string make_usage(const CLI::App*, std::string) const override {
    return fmt::format("\nUsage: {}\n\n", kUsage);
  }
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    // CLI11 puts empty lines both before and between groups.
    return CLI::Formatter::make_group(std::move(group), is_positional, std::move(options))
        .substr(1);
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    if (is_flag(*option)) return "";
    // CLI11 appends what the checks accept.
    const std::string type = option->get_type_name();
    return " " + type.substr(0, type.find(':'));
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    std::vector<std::string> facts;
    if (!option->get_default_str().empty()) facts.push_back("default " + option->get_default_str());
    if (!option->get_envname().empty()) facts.push_back("environment " + option->get_envname());
    if (facts.empty()) return option->get_description();
    return fmt::format("{}\n({})", option->get_description(), base::join(facts, ", "));
  }
};

// The whole of `typed` as a number from min to max; not CLI::Range, which lets nan through.
template <class Number>
auto range(Number min, Number max) {
  return [min, max](const std::string& typed) -> std::string {
    Number number{};
    const auto [end, error] = std::from_chars(typed.data(), typed.data() + typed.size(), number);
    const bool whole = error == std::errc() && end == typed.data() + typed.size();
    if (whole && number >= min && number <= max) return "";
    return fmt::format("expected a number from {} to {}, got '{}'", min, max, typed);
  };
}

// Values as they were typed, before they are checked together.
struct RawOptions {
  std::string nproc_per_node = "1";
  std::string prefix = "on";
  double shutdown_timeout = 30;
  int master_port = 29500;
  LaunchOptions options;
};

void describe(CLI::App& app, RawOptions& raw) {
  LaunchOptions& options = raw.options;
  app.formatter(std::make_shared<HelpFormatter>());
  app.footer(kExamples);
  app.add_option("--nproc_per_node", raw.nproc_per_node,
                 "Workers on this machine: a number, cpu (one per core),\n"
                 "gpu (one per GPU), auto (gpu where there is one, else cpu)")
      ->envname("PET_NPROC_PER_NODE")
      ->type_name("N")
      ->default_str("1")
      ->group("Workers");
  app.add_option("--role", options.role, "What the workers find as ROLE_NAME")
      ->envname("PET_ROLE")
      ->type_name("NAME")
      ->default_str("default")
      ->group("Workers");

  app.add_option("--nnodes", options.nnodes, "Number of machines, or of launchers")
      ->envname("PET_NNODES")
      ->type_name("N")
      ->default_str("1")
      ->check(range(1, 65536))
      ->group("Nodes");
  app.add_option("--node_rank", options.node_rank, "This machine's number, from 0; with --nnodes")
      ->envname("PET_NODE_RANK")
      ->type_name("N")
      ->check(range(0, 65535))
      ->group("Nodes");
  app.add_option("--master_addr", options.master_addr,
                 "Host name or address of node 0; on one machine 127.0.0.1")
      ->envname("PET_MASTER_ADDR")
      ->type_name("HOST")
      ->group("Nodes");
  app.add_option("--master_port", raw.master_port,
                 "TCP port on node 0 that rank 0 listens on; with one machine\n"
                 "a free one is chosen, else 29500; 0 asks for a free one")
      ->envname("PET_MASTER_PORT")
      ->type_name("PORT")
      ->check(range(0, 65535))
      ->group("Nodes");
  app.add_flag("--standalone", options.standalone, "One machine, apart from all other jobs on it")
      ->envname("PET_STANDALONE")
      ->group("Nodes");

  app.add_flag("-m,--module", options.module, "The program is a Python module, as in python -m")
      ->envname("PET_MODULE")
      ->group("Program");
  app.add_flag("--no_python", options.no_python, "Run NAME.py as it is, without Python before it")
      ->envname("PET_NO_PYTHON")
      ->group("Program");
  app.add_flag("--dry_run", options.dry_run, "Print what would be started, and start nothing")
      ->group("Program");

  app.add_option("--shutdown_timeout", raw.shutdown_timeout,
                 "Seconds that workers have to end after a signal, before they are\nkilled")
      ->envname("SYNCBN_SHUTDOWN_TIMEOUT")
      ->type_name("SECONDS")
      ->default_str("30")
      ->check(range(0.0, 86400.0))
      ->group("Ending and output");
  app.add_option("--prefix", raw.prefix,
                 "Put \"[rank] \" before each line when there are several workers")
      ->envname("SYNCBN_PREFIX")
      ->type_name("on|off")
      ->default_str("on")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Ending and output");

  app.set_help_flag("-h,--help", "Show this text")->group("About");
  app.set_version_flag("-V,--version", "syncbn-launch " SYNCBN_VERSION, "Show the version")
      ->group("About");
}

// CLI11 gets options spelled in full; what users may write instead is settled here.
class CommandLine {
 public:
  CommandLine(const CLI::App& app, int argc, const char* const* argv)
      : app_(app), words_(argv + 1, argv + argc) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) names_.push_back(name);
    }
    split();
  }

  const std::vector<std::string>& options() const { return options_; }
  const std::vector<std::string>& program() const { return program_; }

 private:
  void split() {
    size_t i = 0;
    while (i < words_.size() && words_[i].size() > 1 && words_[i][0] == '-') {
      const std::string& word = words_[i++];
      if (word == "--") break;
      if (word[1] != '-') {
        options_.push_back(short_option(word));
        continue;
      }
      const size_t equals = word.find('=');
      const std::string name = full_name(word.substr(2, equals - 2));
      const bool takes_value = !is_flag(*app_.get_option("--" + name));
      std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
      if (takes_value && equals == std::string::npos && i < words_.size()) value = words_[i++];
      if (takes_value && value.empty()) {
        throw base::UserError(fmt::format("option --{} needs a value", name));
      }
      options_.push_back("--" + name + (value.empty() ? "" : "=" + value));
    }
    program_.assign(words_.begin() + static_cast<std::ptrdiff_t>(i), words_.end());
  }

  std::string short_option(const std::string& word) const {
    if (app_.get_option_no_throw(word) != nullptr) return word;
    throw base::UserError(fmt::format("unknown option {}; see syncbn-launch --help", word));
  }

  std::string full_name(std::string typed) const {
    std::replace(typed.begin(), typed.end(), '-', '_');
    std::vector<std::string> matches;
    for (const std::string& name : names_) {
      if (name == typed) return name;
      if (!typed.empty() && name.rfind(typed, 0) == 0) matches.push_back("--" + name);
    }
    if (matches.size() == 1) return matches[0].substr(2);
    if (matches.size() > 1) {
      throw base::UserError(
          fmt::format("option --{} is ambiguous: {}", typed, base::join(matches, ", ")));
    }
    throw base::UserError(fmt::format("unknown option --{}{}; see syncbn-launch --help", typed,
                                      base::did_you_mean(typed, names_)));
  }

  const CLI::App& app_;
  std::vector<std::string> words_;
  std::vector<std::string> names_;
  std::vector<std::string> options_;
  std::vector<std::string> program_;
};

/// What CLI11 says, and where a value came from that is not on the command line.
std::string explain(const CLI::App& app, const CommandLine& line, const CLI::ParseError& error) {
  const std::string message = error.what();
  const std::string name = message.substr(0, message.find(':'));
  const CLI::Option* option = app.get_option_no_throw(name);
  const auto is_it = [&](const std::string& word) { return word.rfind(name + "=", 0) == 0; };
  if (option == nullptr || option->get_envname().empty() ||
      std::any_of(line.options().begin(), line.options().end(), is_it)) {
    return message;
  }
  return fmt::format("environment variable {}, read as {}", option->get_envname(), message);
}

int count_workers(const std::string& typed) {
  if (typed == "cpu") return count_cores();
  if (typed == "auto") return count_gpus() > 0 ? count_gpus() : count_cores();
  if (typed == "gpu") {
    if (count_gpus() > 0) return count_gpus();
    throw base::UserError(
        "--nproc_per_node=gpu: no GPU is visible (CUDA_VISIBLE_DEVICES, /proc/driver/nvidia); "
        "use a number, or cpu");
  }
  constexpr int kMost = 4096;
  int count = 0;
  const auto [end, error] = std::from_chars(typed.data(), typed.data() + typed.size(), count);
  if (error != std::errc() || end != typed.data() + typed.size() || count < 1 || count > kMost) {
    throw base::UserError(fmt::format(
        "--nproc_per_node={}: expected a number from 1 to {}, or auto, cpu, gpu", typed, kMost));
  }
  return count;
}

void check_nodes(const CLI::App& app, const LaunchOptions& options) {
  const bool node_rank_given = app.count("--node_rank") > 0;
  if (options.standalone && options.nnodes > 1) {
    throw base::UserError(fmt::format(
        "--standalone is for one machine, and --nnodes={} asks for more; leave one of them out",
        options.nnodes));
  }
  if (options.node_rank >= options.nnodes) {
    throw base::UserError(
        fmt::format("--node_rank={} is not below --nnodes={}", options.node_rank, options.nnodes));
  }
  if (options.nnodes == 1) return;
  if (!node_rank_given) {
    throw base::UserError(
        fmt::format("--nnodes={0} needs --node_rank, this machine's number from 0 to {1}",
                    options.nnodes, options.nnodes - 1));
  }
  if (options.master_addr.empty()) {
    throw base::UserError(fmt::format(
        "--nnodes={} needs --master_addr, the name or address of node 0", options.nnodes));
  }
  if (options.master_port == 0) {
    throw base::UserError(
        "--master_port=0 (any free port) is for one machine: others cannot know it");
  }
}

}  // namespace

std::optional<LaunchOptions> parse_options(int argc, const char* const* argv) {
  RawOptions raw;
  CLI::App app(
      "Starts the workers of a distributed training run on this machine and stays with\n"
      "them to their end.",
      "syncbn-launch");
  describe(app, raw);
  const CommandLine line(app, argc, argv);
  try {
    std::vector<std::string> reversed(line.options().rbegin(), line.options().rend());
    app.parse(reversed);
  } catch (const CLI::Success& request) {
    app.exit(request);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw base::UserError(explain(app, line, error));
  }

  LaunchOptions options = raw.options;
  options.program = line.program();
  if (options.program.empty()) {
    throw base::UserError(fmt::format("no program given; usage: {}", kUsage));
  }
  options.nproc_per_node = count_workers(raw.nproc_per_node);
  options.shutdown_timeout =
      std::chrono::milliseconds(static_cast<int64_t>(raw.shutdown_timeout * 1000));
  options.prefix = raw.prefix == "on";
  if (app.count("--master_port") > 0) options.master_port = raw.master_port;
  check_nodes(app, options);
  return options;
}

}  // namespace syncbn::launch
