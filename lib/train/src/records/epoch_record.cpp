#include "records/epoch_record.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "records/log_record.h"

namespace syncbn::train {

// Ordered: keys stay in the order in which they are written.
using Json = nlohmann::ordered_json;

std::optional<double> find(const Results& results, const std::string& name) {
  const auto found = std::ranges::find(results, name, &Results::value_type::first);
  return found == results.end() ? std::nullopt : std::optional(found->second);
}

std::string line_of(const EpochRecord& record) {
  Json json;
  json["event"] = "epoch";
  json["time"] = unix_time();
  json["epoch"] = record.epoch;
  json["step"] = record.step;
  json["lr"] = record.lr;
  for (const auto& [name, value] : record.train) json["train_" + name] = value;
  for (const auto& [name, value] : record.eval) json[record.eval_split + "_" + name] = value;
  json["images_per_second"] = record.images_per_second;
  json["data_wait_seconds"] = record.data_wait_seconds;
  json["data_wait_share"] = record.data_wait_share;
  if (record.memory_bytes > 0) json["memory_bytes"] = record.memory_bytes;
  if (record.gpu) {
    json["gpu_memory_bytes"] = record.gpu->memory_bytes;
    if (record.gpu->utilization) json["gpu_utilization"] = *record.gpu->utilization;
  }
  json["seconds"] = record.seconds;
  return json.dump();
}

EpochRecord parse_line(const std::string& line) {
  const Json json = Json::parse(line);
  // JSON has no NaN: it is written as null.
  const auto number = [](const Json& value) {
    return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
  };
  EpochRecord record{.epoch = json.at("epoch"),
                     .step = json.at("step"),
                     .lr = number(json.at("lr")),
                     .images_per_second = number(json.at("images_per_second")),
                     .data_wait_seconds = number(json.at("data_wait_seconds")),
                     .data_wait_share = number(json.at("data_wait_share")),
                     .memory_bytes = field_of(json, "memory_bytes", 0.0),
                     .seconds = number(json.at("seconds"))};
  if (json.contains("gpu_memory_bytes")) {
    record.gpu = {.memory_bytes = number(json.at("gpu_memory_bytes"))};
    if (json.contains("gpu_utilization")) record.gpu->utilization = json.at("gpu_utilization");
  }
  for (const auto& [key, value] : json.items()) {
    for (const std::string split : {"train", "val", "test"}) {
      if (!key.starts_with(split + "_")) continue;
      (split == "train" ? record.train : record.eval)
          .emplace_back(key.substr(split.size() + 1), number(value));
      if (split != "train") record.eval_split = split;
    }
  }
  return record;
}

std::string text_of(const ResultRecord& result) {
  const std::string split = result.last.eval_split + "_";
  Json json;
  if (!result.best_metric.empty()) {
    json["best_" + split + result.best_metric] = result.best_value;
    json["best_mode"] = result.higher_is_better ? "max" : "min";
    json["best_epoch"] = result.best_epoch;
  }
  for (const auto& [name, value] : result.last.eval) json[split + name] = value;
  for (const auto& [name, value] : result.last.train) json["train_" + name] = value;
  json["epochs"] = result.last.epoch;
  json["steps"] = result.last.step;
  json["seconds"] = result.last.seconds;
  json["images_per_second"] = result.last.images_per_second;
  json["world_size"] = result.world_size;
  json["seed"] = result.seed;
  json["sync_batchnorm"] = result.sync_batchnorm;
  return json.dump(2) + "\n";
}

}  // namespace syncbn::train
