#include <syncbn/models/weights.h>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <string_view>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/models/model.h>
#include <syncbn/models/torch_archive.h>

#include "weights/mapped_file.h"
#include "weights/pickle.h"
#include "weights/safetensors.h"
#include "weights/torch_file.h"

namespace syncbn::models {
namespace {

namespace fs = std::filesystem;
using detail::Value;

constexpr const char* kSafetensors = ".safetensors";

bool has_tensors(const Value& dict) {
  return dict.kind == Value::Kind::kDict && std::ranges::any_of(dict.items, [](const Value* item) {
           return item->kind == Value::Kind::kTensor;
         });
}

/// The first keys of a dictionary, for messages.
std::string keys_of(const Value& dict) {
  constexpr size_t kShown = 8;
  std::vector<std::string> keys;
  for (size_t i = 0; i < dict.items.size() && keys.size() < kShown; i += 2) {
    if (dict.items[i]->is_text()) keys.push_back(base::printable(dict.items[i]->text));
  }
  return keys.empty() ? "none" : fmt::format("{}", fmt::join(keys, ", "));
}

const Value& choose(const Value& saved, const std::string& key) {
  if (saved.kind != Value::Kind::kDict) {
    throw base::UserError("it holds no dictionary; in Python, torch.save(model.state_dict(), …)");
  }
  if (!key.empty()) {
    const Value* const found = saved.find(key);
    if (found != nullptr && has_tensors(*found)) return *found;
    throw base::UserError(
        fmt::format("it has no tensors at '{}'; its keys are {}", key, keys_of(saved)));
  }
  for (const char* name : {"state_dict", "model", "model_ema"}) {
    const Value* const found = saved.find(name);
    if (found != nullptr && has_tensors(*found)) return *found;
  }
  if (has_tensors(saved)) return saved;
  throw base::UserError(fmt::format(
      "it has no tensors at state_dict, model or model_ema; its keys are {}", keys_of(saved)));
}

StateDict tensors_of(const Value& dict) {
  StateDict all;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const Value& name = *dict.items[i];
    const Value& value = *dict.items[i + 1];
    if (!name.is_text() || value.kind != Value::Kind::kTensor) continue;
    if (all.contains(name.text)) {
      throw base::UserError(fmt::format("it has '{}' twice", base::printable(name.text)));
    }
    all.insert(name.text, value.tensor);
  }
  return all;
}

/// Removes the prefixes of wrappers.
StateDict without_prefixes(StateDict weights) {
  constexpr std::string_view kPrefixes[] = {"module.", "_orig_mod."};
  constexpr std::string_view kCounter = "n_averaged";  // of torch.optim.swa_utils.AveragedModel
  for (bool found = true; found;) {
    found = false;
    for (const std::string_view prefix : kPrefixes) {
      const auto begins = [&](const auto& item) {
        return item.key().starts_with(prefix) || item.key() == kCounter;
      };
      const bool is_prefix =
          std::ranges::all_of(weights, begins) &&
          std::ranges::any_of(weights, [&](const auto& item) { return item.key() != kCounter; });
      if (!is_prefix) continue;
      StateDict shorter;
      for (const auto& item : weights) {
        if (item.key() != kCounter) shorter.insert(item.key().substr(prefix.size()), item.value());
      }
      weights = std::move(shorter);
      found = true;
    }
  }
  return weights;
}

void add_state(const torch::nn::Module& module, const std::string& prefix, StateDict& all) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    all.insert(prefix + item.key(), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    all.insert(prefix + item.key(), item.value());
  }
  for (const auto& item : module.named_children()) {
    add_state(*item.value(), prefix + item.key() + ".", all);
  }
}

torch::nn::Module& child_of(torch::nn::Module& module, const std::string& name) {
  auto children = module.named_modules(/*name_prefix=*/"", /*include_self=*/false);
  if (const auto* const found = children.find(name)) return **found;
  throw base::UserError(fmt::format("the network has no part '{}'{}", name,
                                    base::did_you_mean(name, children.keys())));
}

/// Renames weights to the network's current names.
StateDict with_present_names(const StateDict& weights, const torch::nn::Module& module,
                             const StateDict& present) {
  const auto* const model = dynamic_cast<const Model*>(&module);
  if (model == nullptr) return weights;
  StateDict all;
  for (const auto& item : weights) {
    std::string name = item.key();
    if (!present.contains(name)) name = model->present_name(name);
    const bool is_taken = all.contains(name) || weights.contains(name);
    all.insert(is_taken ? item.key() : name, item.value());
  }
  return all;
}

bool is_matched(const std::vector<std::string>& wildcards, const std::string& name) {
  return std::ranges::any_of(
      wildcards, [&](const std::string& wildcard) { return base::matches_name(wildcard, name); });
}

void check_wildcards(const std::vector<std::string>& wildcards, const StateDict& present) {
  for (const std::string& wildcard : wildcards) {
    const bool matches = std::ranges::any_of(
        present, [&](const auto& item) { return is_matched({wildcard}, item.key()); });
    if (matches) continue;
    throw base::UserError(
        fmt::format("no parameter or buffer matches '{}', which is to be left out", wildcard));
  }
}

/// "\n  missing: a, b, c, and 4 more".
std::string line(const char* what, const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  return names.empty() ? "" : fmt::format("\n  {}: {}", what, base::join_some(names, ", ", kShown));
}

}  // namespace

std::string weights_file(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  for (const char* name : {"best.pt", "last.pt"}) {
    if (base::exists(fs::path(path) / name)) return (fs::path(path) / name).string();
  }
  throw base::UserError(fmt::format(
      "weights {}: this folder has no best.pt and no last.pt: it is not a run of train", path));
}

StateDict read_state_dict(const std::string& path, const std::string& key) {
  const fs::path name = weights_file(path);
  try {
    const auto file = detail::MappedFile::open(name);
    if (!detail::is_torch_file(file->bytes())) {
      // safetensors has no magic number: it begins with 8 bytes of a length, then JSON.
      const bool is_safetensors =
          file->bytes().size() > sizeof(uint64_t) && file->bytes()[sizeof(uint64_t)] == '{';
      if (!is_safetensors) {
        throw base::UserError("it is neither a file of torch.save nor safetensors");
      }
      if (!key.empty()) {
        throw base::UserError(
            fmt::format("safetensors hold one network, and so no key '{}'; leave it out", key));
      }
      return without_prefixes(detail::read_safetensors(*file));
    }
    detail::Values values(file->bytes().size());
    return without_prefixes(tensors_of(choose(detail::read_torch_file(*file, values), key)));
  } catch (const base::UserError& error) {
    throw base::UserError(fmt::format("weights {}: {}", name.string(), error.what()));
  }
}

LoadReport load_state_dict(torch::nn::Module& whole, const StateDict& saved,
                           const LoadOptions& options) {
  torch::nn::Module& module = options.into.empty() ? whole : child_of(whole, options.into);
  StateDict present = state_dict(module);
  const StateDict weights = with_present_names(saved, module, present);
  check_wildcards(options.skip, present);
  LoadReport report;
  std::vector<std::string> misshapen;
  for (const auto& item : present) {
    const std::string& name = item.key();
    if (is_matched(options.skip, name)) {
      report.skipped.push_back(name);
    } else if (const at::Tensor* const found = weights.find(name)) {
      report.loaded.push_back(name);
      if (found->sizes() != item.value().sizes()) {
        misshapen.push_back(fmt::format("{} ([{}], the network has [{}])", name,
                                        fmt::join(found->sizes(), ", "),
                                        fmt::join(item.value().sizes(), ", ")));
      }
    } else if (!name.ends_with("num_batches_tracked")) {
      report.missing.push_back(name);
    }
  }
  for (const auto& item : weights) {
    if (!present.contains(item.key())) report.unexpected.push_back(base::printable(item.key()));
  }
  std::string faults = line("of another shape", misshapen);
  if (options.strict) {
    if (options.into.empty()) faults = line("unexpected", report.unexpected) + faults;
    faults = line("missing", report.missing) + faults;
  }
  if (!faults.empty()) throw base::UserError("the weights do not fit the network:" + faults);
  const at::NoGradGuard no_grad;
  for (const std::string& name : report.loaded) present[name].copy_(weights[name]);
  return report;
}

StateDict state_dict(const torch::nn::Module& module) {
  StateDict all;
  add_state(module, "", all);
  return all;
}

void write_state_dict(const std::string& path, const torch::nn::Module& module) {
  const std::string extension = fs::path(path).extension();
  const StateDict all = state_dict(module);
  if (extension == kSafetensors) {
    write_parts(path, [&](const Sink& sink) { detail::write_safetensors(all, sink); });
    return;
  }
  if (extension != ".pth" && extension != ".pt" && extension != ".bin") {
    throw base::UserError(fmt::format(
        "cannot write {}: weights are written as .pth, .pt, .bin or .safetensors", path));
  }
  Dict dict = make_dict();
  for (const auto& item : all) put(dict, item.key(), on_host(item.value()));
  write_parts(path, [&](const Sink& sink) { write_torch_archive(dict, sink); });
}

}  // namespace syncbn::models
