#include "export.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
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
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>

#include "compute_threads.h"
#include "model.h"
#include "resolved_config.h"
#include "saved_network.h"
#include "sealed_archive.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// What the command line asks for.
struct Request {
  ResolvedConfig resolved;
  models::ExportFormat format = models::ExportFormat::kTorchScript;
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

models::ExportFormat format_of(const std::string& name, config::Faults& faults) {
  const auto& names = models::export_formats();
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    faults.add({}, fmt::format("--format: expected {}, got '{}'", base::join(names, ", "), name));
    return models::ExportFormat::kTorchScript;
  }
  return static_cast<models::ExportFormat>(found - names.begin());
}

Request parse(const std::vector<std::string>& args,
              const std::vector<config::ProgramOption>& options) {
  config::Faults faults;
  const auto line =
      config::parse_command_line({args.begin() + 1, args.end()}, options, config_fields(), faults);
  constexpr std::string_view kKnown[] = {"config", "format", "output", "ema"};
  for (const auto& setting : line.program) {
    if (std::ranges::count(kKnown, setting.name) > 0) continue;
    faults.add({}, fmt::format("--{}: not for train export", setting.name));
  }
  Request request;
  request.format = format_of(line.value("format").value_or("torchscript"), faults);
  request.output = line.value("output");
  request.takes_average = line.has("ema");
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

}  // namespace

int export_checkpoint(const std::vector<std::string>& args,
                      const std::vector<config::ProgramOption>& options) {
  refuse_ranks();
  const Request request = parse(args, options);
  const Config& config = request.resolved.config;
  spare_waiting_threads(config, args);
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  const std::string output =
      request.output.value_or(request.resolved.name + models::extension(request.format));
  refuse_existing(output, config.overwrite);
  const std::string checkpoint = checkpoint_file("export", config, request.resolved.name).string();
  const auto dataset = any_split(config);
  const auto model = make_network(config, *dataset);
  models::ExportInfo info{.classes = {},
                          .mean = dataset->normalization().mean,
                          .std = dataset->normalization().std,
                          .size = dataset->sample_shape()};
  try {
    info.classes = load_weights(checkpoint, request.takes_average, *model);
  } catch (const base::UserError& error) {
    throw base::UserError(fmt::format("cannot export {}: {}", checkpoint, error.what()));
  }
  if (info.classes.empty()) info.classes = dataset->class_names();
  const bool is_whole = request.format == models::ExportFormat::kTorchScript ||
                        request.format == models::ExportFormat::kOnnx;
  if (is_whole && dynamic_cast<const models::Gan*>(model.get()) != nullptr) {
    throw base::UserError(
        "export: two networks in one have no single input; choose --format torch or safetensors");
  }
  models::export_model(output, request.format, *model, info);
  spdlog::info("exported {} as {}", checkpoint,
               models::export_formats()[static_cast<size_t>(request.format)]);
  base::write_stdout(output + "\n");
  return base::kExitOk;
}

}  // namespace syncbn::train
