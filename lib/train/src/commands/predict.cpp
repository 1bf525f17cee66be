#include "commands/commands.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>
#include <syncbn/data/boxes.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/unlabelled_images.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoints/saved_network.h"
#include "commands/unlabelled.h"
#include "common/agreement.h"
#include "common/rank_0.h"
#include "evaluation.h"
#include "records/pictures.h"
#include "start_report.h"
#include "step/model.h"
#include "step/training_step.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

using RowsByImage = std::map<int64_t, std::vector<std::string>>;

/// Masks are named after their images, except for the extension.
void check_masks(const std::vector<fs::path>& files) {
  std::map<fs::path, fs::path> images;
  for (const fs::path& file : files) {
    const auto [other, is_new] = images.emplace(fs::path(file).replace_extension(), file);
    if (is_new) continue;
    throw base::UserError(
        fmt::format("predict: the masks of '{}' and '{}' have the same name; rename one of them",
                    other->second.string(), file.string()));
  }
}

/// Takes from the training data what the checkpoint does not say about its classes.
void take_classes_of_training_data(const Config& config, data::UnlabelledImagesOptions& options) {
  const auto set = config.data.make(data::Split::kTrain);
  if (!options.class_names.empty() && options.class_names != set->class_names()) {
    throw base::UserError("predict: the training data has other classes than the checkpoint");
  }
  options.class_names = set->class_names();
  options.classes = set->num_classes();
  options.category_ids = data::category_ids(*set);
}

data::UnlabelledImages find_images(const Config& config, const SavedNetwork& network,
                                   const std::string& folder) {
  auto known = unlabelled_options(config, network.checkpoint());
  if (!known) {
    throw base::UserError(fmt::format(
        "predict: data of type {} has no test_transforms, which say how image files become samples",
        config.data.type()));
  }
  data::UnlabelledImagesOptions& options = *known;
  if (lacks_classes(config, options)) take_classes_of_training_data(config, options);
  options.images = folder;
  auto images = data::load_unlabelled_images(options);
  if (options.labels_pixels && !images.are_whole) {
    throw base::UserError(
        "predict: data.test_transforms does more than resize, and a mask shows its whole image; "
        "remove crops from it");
  }
  if (options.labels_pixels) check_masks(images.files);
  return images;
}

/// Describes the images of a batch for the task.
std::vector<UnlabelledImage> describe(const data::UnlabelledImages& images,
                                      const data::Batch& batch) {
  std::vector<UnlabelledImage> all;
  for (size_t i = 0; i < batch.indices.size(); ++i) {
    const int64_t index = batch.indices[i];
    UnlabelledImage image{.file = images.files[static_cast<size_t>(index)].string(),
                          .index = index,
                          .input = {.width = batch.data.size(3), .height = batch.data.size(2)}};
    if (batch.sizes.defined()) {
      const at::Tensor size = batch.sizes[static_cast<int64_t>(i)];
      image.input = {.width = size[1].item<int64_t>(), .height = size[0].item<int64_t>()};
    }
    image.size = images.are_whole ? images.original_size(index) : image.input;
    all.push_back(std::move(image));
  }
  return all;
}

void write_mask(const fs::path& output, const std::string& file, const data::Image& mask) {
  const fs::path path = (output / file).replace_extension(".png");
  std::error_code ignored;  // writing the file then fails, with a message
  fs::create_directories(path.parent_path(), ignored);
  const at::Tensor& colors = class_colors();  // viewers show labels, which are small, as black
  base::write_file_atomically(
      path, data::encode_png(mask, {colors.const_data_ptr<uint8_t>(), colors.nbytes()}));
}

/// Gathers the rows of all ranks, by image, on rank 0.
RowsByImage gather_rows(const RowsByImage& own) {
  // Not as text: JSON is UTF-8, and a file's name may be anything.
  const std::vector<uint8_t> packed = nlohmann::json::to_msgpack(own);
  RowsByImage all;
  for (const std::string& bytes :
       dist::gather_bytes(std::string(packed.begin(), packed.end()), /*root=*/0)) {
    all.merge(nlohmann::json::from_msgpack(bytes).get<RowsByImage>());
  }
  return all;
}

void check_paths(const fs::path& images, const fs::path& output, bool overwrite) {
  if (base::is_missing(images)) {
    throw base::UserError(fmt::format("predict: there is no file or folder {}", images.string()));
  }
  if (overwrite || !base::exists(output)) return;
  throw base::UserError(fmt::format(
      "predict: {} exists; choose another --output, or replace files in it with --overwrite",
      output.string()));
}

/// Prints the answer about a single image, if it is short. Those about many are for the file.
void show_answer(const RowsByImage& all, const std::string& separator) {
  constexpr size_t kMaxRows = 10;
  if (all.size() != 1 || all.begin()->second.size() > kMaxRows) return;
  std::string text = base::join(all.begin()->second, separator);
  if (!text.ends_with('\n')) text += '\n';
  base::write_stdout(text);
}

}  // namespace

int predict(const Config& config, const std::string& text, const std::string& name,
            const std::string& folder, const std::string& output, bool average) {
  do_on_rank_0([&] { check_paths(folder, output, config.overwrite); });
  const SavedNetwork network("predict", config, name);
  data::UnlabelledImages images;
  on_each_rank([&] { images = find_images(config, network, folder); });
  Inputs inputs;
  inputs.train_set = inputs.eval_set = images.set;
  check_agreement(text, inputs);
  if (is_rank_0()) {
    if (!images.others.empty()) spdlog::warn("left out: {}: neither JPEG nor PNG", images.others);
    warn_of_survey(*images.set, data::Split::kTest, kShortSurvey, folder);
  }
  const auto model = make_model(config, *images.set, config.seed.value_or(0));
  const auto task = make_task(config, *images.set, *model);
  report_on_rank_0([&] {
    if (task->predicts()) return;
    throw base::UserError(
        fmt::format("predict: a network of task {} says nothing about images", config.task.type()));
  });
  network.load_into(*model, average);
  model->eval();
  data::LoaderOptions loader_options =
      config.loader.options(config.local_batch_size(dist::world_size()), dist::device());
  loader_options.sample_name = "image";
  loader_options.on_error_advice = "loader.on_error=skip leaves such images out";
  const BatchToDevice to_device =
      batch_to_device(config, *model, *images.set, loader_options.pin_memory);
  data::Loader loader = each_once(images.set, loader_options, dist::world_size(), dist::rank());
  const at::NoGradGuard no_grad;
  RowsByImage rows;
  while (const auto batch = loader.next()) {
    if (batch->size() == 0) continue;
    const Autocast autocast(config, dist::device());
    const auto outputs = full_precision(task->forward(*model, /*turn=*/0, to_device(*batch)));
    const auto asked = describe(images, *batch);
    auto predictions = task->predict(outputs, asked);
    for (size_t i = 0; i < predictions.size(); ++i) {
      if (predictions[i].mask) write_mask(output, asked[i].file, *predictions[i].mask);
      rows[batch->indices[i]] = std::move(predictions[i].rows);
    }
  }
  const RowsByImage all = gather_rows(rows);
  const PredictionFile file = task->prediction_file();
  const int64_t readable = std::ssize(images.files);
  const int64_t wanted = readable + images.num_others;
  const int64_t left_out = wanted - std::ssize(all);
  do_on_rank_0([&] {
    data::check_skipped(loader_options, readable - std::ssize(all), readable);
    if (file.name.empty()) return;
    std::vector<std::string> lines;
    for (const auto& [index, of_image] : all) {
      lines.insert(lines.end(), of_image.begin(), of_image.end());
    }
    std::error_code ignored;
    fs::create_directories(output, ignored);
    base::write_file_atomically(fs::path(output) / file.name,
                                file.opening + base::join(lines, file.separator) + file.closing);
  });
  if (is_rank_0()) {
    spdlog::info("{}: {}{}, by {}", (fs::path(output) / file.name).string(),
                 base::counted(std::ssize(all), "image"),
                 left_out > 0 ? fmt::format(" ({} left out)", left_out) : "", network.path());
    if (!file.name.empty()) show_answer(all, file.separator);
  }
  do_on_rank_0([&] {
    if (left_out == 0 || config.loader.on_error == "skip") return;
    throw base::UserError(
        fmt::format("predict: {} of {} left out: convert them to JPEG or PNG, or accept that with "
                    "loader.on_error=skip",
                    left_out, base::counted(wanted, "image")));
  });
  return base::kExitOk;
}

}  // namespace syncbn::train
