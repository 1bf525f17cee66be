#include "common/config_keys.h"

#include <algorithm>
#include <initializer_list>

namespace syncbn::train {
namespace {

bool is_among(std::string_view key, std::initializer_list<std::string_view> keys) {
  return std::ranges::find(keys, key) != keys.end();
}

/// Keys about the machine.
bool is_local(std::string_view key) {
  return is_incidental(key) ||
         is_among(key,
                  {"plugins", "init", "init_key", "device", "threads", "timeout", "connect_timeout",
                   "loader.num_workers", "loader.prefetch", "loader.pin_memory", "loader.timeout"});
}

}  // namespace

bool is_of_folder(std::string_view key) {
  return is_among(key, {"run_dir", "resume", "overwrite"});
}

bool is_incidental(std::string_view key) {
  return is_of_folder(key) || is_among(key, {"report", "log_interval"});
}

bool is_path_of_data(std::string_view key) {
  return is_among(key, {"data.path", "data.train", "data.val", "data.test", "data.train_images",
                        "data.train_masks", "data.val_images", "data.val_masks", "data.test_images",
                        "data.test_masks", "data.train_annotations", "data.val_annotations",
                        "data.test_annotations", "data.root"});
}

bool may_differ(std::string_view key) {
  // The contents of the files are compared instead.
  return is_local(key) || is_path_of_data(key) || key == "data.cache_dir";
}

bool may_change(std::string_view key) {
  for (const char* begin : {"init_", "nccl.", "profile.", "tensorboard.", "early_stop."}) {
    if (key.starts_with(begin)) return true;
  }
  return is_local(key) || is_among(key, {"epochs", "start_epoch", "max_steps", "max_time",
                                         "backend", "checkpoint.every", "checkpoint.on",
                                         "checkpoint.keep_last", "checkpoint.keep_best.count"});
}

}  // namespace syncbn::train
