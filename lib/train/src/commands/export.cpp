#include "commands/export.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/models/export.h>
#include <syncbn/models/gan.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/command.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>

#include "checkpoints/python_run.h"
#include "checkpoints/saved_network.h"
#include "checkpoints/sealed_archive.h"
#include "commands/resolved_config.h"
#include "common/naming.h"
#include "records/run_folder.h"
#include "step/compute_threads.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// Formats of whole runs, in the order of PythonScript.
constexpr std::array<std::string_view, 2> kRunFormats = {"torchvision-run", "imagenet-run"};

/// What the command line asks for.
struct Request {
  ResolvedConfig resolved;
  models::ExportFormat format = models::ExportFormat::kTorchScript;
  std::optional<PythonScript> script;  ///< for a run; `format` does not count then
  std::optional<std::string> output;
  bool takes_average = false;
};

void refuse_ranks() {
  const auto world_size = base::env_int("WORLD_SIZE", 1, std::numeric_limits<int>::max());
  if (world_size.value_or(1) == 1) return;
  throw base::UserError(fmt::format(
      "export: one process writes the file, and WORLD_SIZE is {}; start train without a launcher",
      *world_size));
}

void set_format(const std::string& name, Request& request, config::Faults& faults) {
  const auto& names = models::export_formats();
  const auto found = std::ranges::find(names, name);
  const auto run = std::ranges::find(kRunFormats, name);
  if (found != names.end()) {
    request.format = static_cast<models::ExportFormat>(found - names.begin());
  } else if (run != kRunFormats.end()) {
    request.script = static_cast<PythonScript>(run - kRunFormats.begin());
  } else {
    faults.add({}, fmt::format("--format: expected {}, {}, got '{}'", base::join(names, ", "),
                               fmt::join(kRunFormats, ", "), name));
  }
}

Request parse(const std::vector<std::string>& args,
              const std::vector<config::ProgramOption>& options) {
  config::Faults faults;
  const auto line = config::parse_command_line(args, options, config_fields(), faults);
  constexpr std::string_view kKnown[] = {"config", "format", "output", "ema"};
  for (const auto& setting : line.program) {
    if (std::ranges::count(kKnown, setting.name) > 0) continue;
    faults.add({}, fmt::format("--{}: not for train export", setting.name));
  }
  Request request;
  set_format(line.value("format").value_or("torchscript"), request, faults);
  request.output = line.value("output");
  request.takes_average = line.has("ema");
  if (request.script && request.takes_average) {
    faults.add({}, "--ema: a run is exported with its network and its average");
  }
  request.resolved = resolve_config(line, faults);
  return request;
}

/// For the shape of the images, the classes and the normalisation.
std::shared_ptr<const data::Dataset> any_split(const Config& config) {
  for (const auto split : {data::Split::kTest, data::Split::kVal, data::Split::kTrain}) {
    if (auto set = config.data.make(split)) return set;
  }
  throw base::UserError("export: the data has no split");
}

std::shared_ptr<models::Model> make_network(const Config& config, const data::Dataset& dataset) {
  return config.model.make(models::ModelArgs{.num_classes = dataset.num_classes(),
                                             .sample_shape = dataset.sample_shape()});
}

/// Fills the network with the weights of a file, ours or Python's.
/// @return the names of the classes, if the file has them
std::vector<std::string> load_weights(const std::string& path, bool takes_average,
                                      models::Model& model) {
  const std::string bytes = base::read_file(path);
  if (is_of_python(bytes)) {
    models::load_state_dict(model, models::read_state_dict(path, takes_average ? "model_ema" : ""));
    return {};
  }
  const Checkpoint checkpoint = parse_checkpoint(bytes, path);
  if (takes_average && checkpoint.ema.empty()) {
    throw base::UserError("--ema: it has no moving average; the run had ema.decay: 0");
  }
  load_model(takes_average ? checkpoint.ema : checkpoint.model, model);
  return checkpoint.classes;
}

void refuse_existing(const fs::path& path, bool overwrite) {
  std::error_code ignored;
  if (overwrite || !fs::is_regular_file(path, ignored)) return;
  throw base::UserError(fmt::format(
      "export: {} exists; choose another --output, or replace it with --overwrite", path.string()));
}

/// Writes a run for --resume of a script of Python's. @return the checkpoint that it was written of
std::string export_run(const std::string& output, PythonScript script,
                       const ResolvedConfig& resolved, models::Model& model) {
  const Config& config = resolved.config;
  const bool is_named = !config.resume.empty() && config.resume != "auto";
  const std::string path =
      is_named ? config.resume
               : (RunFolder::newest(config.run_dir, resolved.name) / RunFolder::kLast).string();
  naming("cannot export " + path, [&] {
    const Checkpoint checkpoint = parse_checkpoint(base::read_file(path), path);
    const models::Dict run = to_python_run(checkpoint, script, config, model);
    models::write_parts(output,
                        [&](const models::Sink& sink) { models::write_torch_archive(run, sink); });
  });
  return path;
}

/// Writes a network. @return the checkpoint that it was read from
std::string export_network(const std::string& output, const Request& request,
                           const data::Dataset& dataset, models::Model& model) {
  const std::string checkpoint =
      checkpoint_file("export", request.resolved.config, request.resolved.name).string();
  models::ExportInfo info{.classes = {},
                          .mean = dataset.normalization().mean,
                          .std = dataset.normalization().std,
                          .size = dataset.sample_shape()};
  naming("cannot export " + checkpoint,
         [&] { info.classes = load_weights(checkpoint, request.takes_average, model); });
  if (info.classes.empty()) info.classes = dataset.class_names();
  const bool is_whole = request.format == models::ExportFormat::kTorchScript ||
                        request.format == models::ExportFormat::kOnnx;
  if (is_whole && dynamic_cast<const models::Gan*>(&model) != nullptr) {
    throw base::UserError(
        "export: two networks in one have no single input; choose --format torch or safetensors");
  }
  models::export_model(output, request.format, model, info);
  return checkpoint;
}

}  // namespace

int export_checkpoint(const std::vector<std::string>& args,
                      const std::vector<config::ProgramOption>& options) {
  refuse_ranks();
  const Request request = parse(args, options);
  const Config& config = request.resolved.config;
  std::vector<std::string> words = {"export"};
  words.insert(words.end(), args.begin(), args.end());
  spare_waiting_threads(config, words);
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  const std::string format = request.script
                                 ? std::string(kRunFormats[static_cast<size_t>(*request.script)])
                                 : models::export_formats()[static_cast<size_t>(request.format)];
  const std::string extension = request.script ? ".pth" : models::extension(request.format);
  const std::string output = request.output.value_or(request.resolved.name + extension);
  refuse_existing(output, config.overwrite);
  const auto dataset = any_split(config);
  const auto model = make_network(config, *dataset);
  const std::string checkpoint = request.script
                                     ? export_run(output, *request.script, request.resolved, *model)
                                     : export_network(output, request, *dataset, *model);
  spdlog::info("exported {} as {}", checkpoint, format);
  base::write_stdout(output + "\n");
  return base::kExitOk;
}

}  // namespace syncbn::train
