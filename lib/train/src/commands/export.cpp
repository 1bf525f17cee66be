#include "commands/commands.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/json_schema.h>
#include <syncbn/models/export.h>
#include <syncbn/models/gan.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>

#include "checkpoints/saved_network.h"
#include "checkpoints/sealed_archive.h"
#include "commands/program_options.h"
#include "commands/resolved_config.h"
#include "commands/unlabelled.h"
#include "common/naming.h"
#include "step/compute_threads.h"
#include "step/model.h"

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

void set_format(const std::string& name, Request& request, config::Faults& faults) {
  const auto& names = models::export_formats();
  const auto found = std::ranges::find(names, name);
  if (found != names.end()) {
    request.format = static_cast<models::ExportFormat>(found - names.begin());
  } else if (name == "torchvision-run" || name == "imagenet-run") {
    faults.add({}, fmt::format("--format: {} was removed; use torch, which has the weights", name));
  } else {
    faults.add({}, fmt::format("--format: expected {}, got '{}'", base::join(names, ", "), name));
  }
}

/// The only format with this extension; nothing for .pt and .pth, which other formats may have.
std::optional<std::string> format_by_ending(const std::string& ending) {
  for (const auto format : {models::ExportFormat::kOnnx, models::ExportFormat::kSafetensors}) {
    if (ending == models::extension(format)) {
      return models::export_formats()[static_cast<size_t>(format)];
    }
  }
  return std::nullopt;
}

/// The format that files with another extension usually have; empty if it says nothing.
std::string usual_format(const std::string& ending) {
  if (ending == models::extension(models::ExportFormat::kTorch)) return "torch";
  const bool is_usual =
      ending.empty() || ending == models::extension(models::ExportFormat::kTorchScript);
  return is_usual ? "torchscript" : "";
}

Request parse(const std::vector<std::string>& args) {
  config::Faults faults;
  const auto line = parse_arguments("export", args, faults);
  Request request;
  request.output = line.value("output");
  const fs::path output = request.output.value_or("");
  std::error_code ignored;
  const std::string ending = fs::is_directory(output, ignored) ? "" : output.extension();
  const auto of_ending = format_by_ending(ending);
  const std::string format =
      line.value("format").value_or(of_ending.value_or(usual_format(ending)));
  if (format.empty()) {
    faults.add({}, fmt::format("--output: {} ends like no format; add --format: {}",
                               *request.output, base::join(models::export_formats(), ", ")));
  } else {
    set_format(format, request, faults);
  }
  if (of_ending && line.value("format") && *line.value("format") != *of_ending) {
    faults.add(
        {},
        fmt::format(
            "--output: {} is for {}, and --format is {}; name another file, or leave out --format",
            *request.output, *of_ending, *line.value("format")));
  }
  request.takes_average = line.has("ema");
  request.resolved = resolve_config(line, faults);
  return request;
}

/// A checkpoint's file.
struct Saved {
  std::string path;
  std::optional<Checkpoint> own;  ///< nothing: it is Python's
};

Saved read_saved(const fs::path& path) {
  Saved saved{.path = path.string(), .own = {}};
  naming("cannot export " + saved.path, [&] {
    const std::string bytes = load_file(path);
    if (!is_of_python(bytes)) saved.own = parse_checkpoint(bytes, saved.path);
  });
  return saved;
}

/// A data set for the shape of the images, the classes and the normalisation. Reads no image if the
/// checkpoint has the classes.
std::shared_ptr<const data::Dataset> dataset_of(const Config& config, const Saved& saved) {
  // Only a plug-in's data set knows what its samples look like.
  const auto& entry = data::DatasetKind::registry().entries().at(config.data.type());
  const bool is_ours = entry.origin.value_or("").empty();
  const auto options =
      saved.own && is_ours ? unlabelled_options(config, &*saved.own) : std::nullopt;
  if (options && !lacks_classes(config, *options))
    return data::load_unlabelled_images(*options).set;
  for (const auto split : {data::Split::kTest, data::Split::kVal, data::Split::kTrain}) {
    if (auto set = config.data.make(split)) return set;
  }
  throw base::UserError("export: the data has no split");
}

/// Loads the weights of a file, ours or Python's, into the network.
void load_weights(const Saved& saved, bool takes_average, models::Model& model) {
  if (!saved.own) {
    models::load_state_dict(model,
                            models::read_state_dict(saved.path, takes_average ? "model_ema" : ""));
    return;
  }
  if (takes_average && saved.own->ema.empty()) {
    throw base::UserError("--ema: it has no moving average; the run had ema.decay: 0");
  }
  load_model(takes_average ? saved.own->ema : saved.own->model, model);
}

/// data.test_transforms as JSON; empty for data without.
std::string transforms_of(const Config& config) {
  const config::Value all = config::Schema<Config>::get().write(config);
  const config::Value* const transforms = all.find("data")->find("test_transforms");
  return transforms == nullptr ? "" : config::to_json(*transforms);
}

/// The file to write. If --output is a folder, the file in it gets the default name.
fs::path output_file(const Request& request, const fs::path& checkpoint) {
  const std::string extension = models::extension(request.format);
  const fs::path wanted = request.output ? fs::path(*request.output) : checkpoint.parent_path();
  std::error_code ignored;
  const bool is_folder = !request.output || fs::is_directory(wanted, ignored);
  const fs::path file = is_folder ? wanted / (request.resolved.name + extension) : wanted;
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, ignored)) {
    throw base::UserError(fmt::format(
        "export: {} is no folder; make it, or choose another --output", folder.string()));
  }
  if (fs::equivalent(file, checkpoint, ignored)) {
    throw base::UserError(
        fmt::format("export: {} is the checkpoint; choose another --output", file.string()));
  }
  if (!request.resolved.config.overwrite && fs::is_regular_file(file, ignored)) {
    throw base::UserError(
        fmt::format("export: {} exists; choose another --output, or replace it with --overwrite",
                    file.string()));
  }
  return file;
}

void export_network(const std::string& output, const Request& request, const Saved& saved,
                    const data::Dataset& dataset, models::Model& model) {
  const bool is_whole = request.format == models::ExportFormat::kTorchScript ||
                        request.format == models::ExportFormat::kOnnx;
  if (is_whole && dynamic_cast<const models::Gan*>(&model) != nullptr) {
    throw base::UserError(
        "export: two networks in one have no single input; choose --format torch or safetensors");
  }
  naming("cannot export " + saved.path, [&] { load_weights(saved, request.takes_average, model); });
  const bool names_classes = saved.own && !saved.own->classes.empty();
  models::export_model(output, request.format, model,
                       {.classes = names_classes ? saved.own->classes : dataset.class_names(),
                        .mean = dataset.normalization().mean,
                        .std = dataset.normalization().std,
                        .size = dataset.sample_shape(),
                        .transforms = transforms_of(request.resolved.config)});
}

}  // namespace

int export_checkpoint(const std::vector<std::string>& args) {
  const Request request = parse(args);
  const Config& config = request.resolved.config;
  std::vector<std::string> words = {"export"};
  words.insert(words.end(), args.begin(), args.end());
  if (request.resolved.can_be_reread) spare_waiting_threads(config, words);
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  const std::string& format = models::export_formats()[static_cast<size_t>(request.format)];
  const fs::path checkpoint = checkpoint_file("export", config, request.resolved.name);
  const std::string output = output_file(request, checkpoint).string();
  const Saved saved = read_saved(checkpoint);
  const auto dataset = dataset_of(config, saved);
  const auto model = config.model.make(models::ModelArgs{.num_classes = dataset->num_classes(),
                                                         .sample_shape = dataset->sample_shape()});
  export_network(output, request, saved, *dataset, *model);
  spdlog::info("exported {} as {}", saved.path, format);
  base::write_stdout(output + "\n");
  return base::kExitOk;
}

}  // namespace syncbn::train
