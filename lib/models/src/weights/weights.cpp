#include <syncbn/models/weights.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
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

bool has_tensors(const Value& dict) {
  return dict.kind == Value::Kind::kDict &&
         std::ranges::count(dict.items, Value::Kind::kTensor, &Value::kind) > 0;
}

std::string text_of_object(const Value& value) {
  return "the Python object " + base::printable(value.text) +
         ", which is not read (nothing was executed); in Python, torch.save(model.state_dict(), …)";
}

/// The values of a dictionary, and after them those of its dictionaries as "name.name".
std::vector<std::pair<std::string, const Value*>> two_levels_of(const Value& saved) {
  auto all = saved.entries();
  for (const auto& [name, value] : saved.entries()) {
    if (value->is_object) continue;  // options, which hold paths
    for (const auto& [below, inner] : value->entries()) all.emplace_back(name + "." + below, inner);
  }
  return all;
}

/// @param key of the network to take; empty: the usual ones, or the only one
const Value& choose(const Value& saved, const std::string& key) {
  if (saved.is_unread()) throw base::UserError("it holds " + text_of_object(saved));
  if (saved.kind != Value::Kind::kDict) {
    throw base::UserError("it holds no dictionary; in Python, torch.save(model.state_dict(), …)");
  }
  std::vector<std::string> wanted{key};
  if (key.empty()) wanted = {"state_dict", "model", "model_ema"};
  const auto values = two_levels_of(saved);
  for (const std::string& name : wanted) {
    for (const auto& [path, value] : values) {
      if (path == name && has_tensors(*value)) return *value;
    }
  }
  if (key.empty() && has_tensors(saved)) return saved;
  std::vector<std::string> keys;
  for (const auto& [name, value] : saved.entries()) keys.push_back(name);
  std::vector<std::string> levels[2];  // of networks
  std::map<int, std::string> objects;  // the likeliest network first
  for (const auto& [path, value] : values) {
    const std::string top = path.substr(0, path.find('.'));
    const bool is_below = top != path;
    if (has_tensors(*value)) levels[is_below].push_back(path);
    const int rank = (std::ranges::count(wanted, top) > 0 ? 0 : 2) + (is_below ? 1 : 0);
    if (!value->is_unread()) continue;
    objects.emplace(rank, fmt::format("; '{}' is {}", path, text_of_object(*value)));
  }
  const auto& networks = levels[levels[0].empty()];
  if (key.empty() && networks.size() == 1) return choose(saved, networks.front());
  constexpr size_t kShown = 8;
  const std::string choice = networks.empty() ? ""
                                              : "; name one of its networks (init_key): " +
                                                    base::join_some(networks, ", ", kShown);
  throw base::UserError(
      base::printable(fmt::format("it has no tensors at {}; its keys are {}{}{}",
                                  key.empty() ? "state_dict, model or model_ema" : "'" + key + "'",
                                  keys.empty() ? "none" : base::join_some(keys, ", ", kShown),
                                  choice, objects.empty() ? "" : objects.begin()->second)));
}

/// What a file is that is neither torch.save's nor safetensors, for messages.
std::string what_it_is(std::string_view bytes) {
  constexpr std::pair<std::string_view, const char*> kKinds[] = {
      {"{",
       "it is JSON, such as the index of weights in several files: name their file if it is one, "
       "otherwise load them in Python and save one"},
      {"\x89HDF", "it is a file of HDF5, as Keras writes: save the weights with PyTorch"},
      {"\x93NUMPY", "it is an array of NumPy: save a dictionary of tensors with torch.save"},
      {"\x80", "it is a pickle, but none of torch.save: save it with torch.save"},
  };
  bytes.remove_prefix(std::min(bytes.find_first_not_of(" \t\r\n\xef\xbb\xbf"), bytes.size()));
  for (const auto& [magic, what] : kKinds) {
    if (bytes.starts_with(magic)) return what;
  }
  return base::foreign_file(bytes, "it is neither a file of torch.save nor safetensors");
}

StateDict tensors_of(const Value& dict) {
  StateDict all;
  for (const auto& [name, value] : dict.entries()) {
    if (value->is_unread()) all.unread[name] = value->text;
    if (value->kind != Value::Kind::kTensor) continue;
    if (all.contains(name)) {
      throw base::UserError(fmt::format("it has '{}' twice", base::printable(name)));
    }
    all.insert(name, value->tensor);
  }
  return all;
}

void add_state(const torch::nn::Module& module, const std::string& prefix, StateDict& all) {
  for (const auto& own :
       {module.named_parameters(/*recurse=*/false), module.named_buffers(/*recurse=*/false)}) {
    for (const auto& item : own) all.insert(prefix + item.key(), item.value());
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

/// A name without the parts that wrappers of modules insert.
std::string unwrapped(const std::string& name) {
  std::string text = "." + name;
  for (const std::string_view part :
       {".module.", "._orig_mod.", "._fsdp_wrapped_module.", "._checkpoint_wrapped_module."}) {
    for (size_t at = 0; (at = text.find(part)) != text.npos;) text.erase(at, part.size() - 1);
  }
  return text.substr(1);
}

bool is_matched(const std::vector<std::string>& wildcards, const std::string& name) {
  return std::ranges::any_of(
      wildcards, [&](const std::string& wildcard) { return base::matches_name(wildcard, name); });
}

/// @param where the names are: "file"
void check_wildcards(const std::vector<std::string>& wildcards,
                     const std::vector<std::string>& names, const char* where) {
  for (const std::string& wildcard : wildcards) {
    if (std::ranges::any_of(names, std::bind_front(base::matches_name, wildcard))) continue;
    throw base::UserError(
        fmt::format("no tensor in the {} matches '{}', which is to be left out", where, wildcard));
  }
}

/// Whether this is batch norm's count of batches, which fits any network.
bool is_counter(const std::string& name) {
  return name.ends_with("num_batches_tracked");
}

/// The tensors under other names. What is not read is undefined.
StateDict renamed(const StateDict& tensors, std::string (*name_of)(const std::string&)) {
  StateDict all;
  const auto add = [&](const std::string& wrapped, const at::Tensor& tensor,
                       const std::string& type) {
    constexpr size_t kMaxName = 1000;  // characters; no network has more
    if (wrapped.size() > kMaxName) return;
    const std::string name = name_of(wrapped);
    if (all.contains(name)) {
      throw base::UserError(
          fmt::format("'{}' is there twice, once with `module.` or the like in its name",
                      base::printable(name)));
    }
    all.insert(name, tensor);
    if (!tensor.defined()) all.unread[name] = type;
  };
  for (const auto& item : tensors) add(item.key(), item.value(), "");
  for (const auto& [name, type] : tensors.unread) add(name, {}, type);
  return all;
}

/// The beginnings of names in a file, such as "model.", after which most names, with fitting
/// shapes, are the network's; only an empty one if that is among them.
/// @param name_in_network changes a name into the network's
std::vector<std::string> prefixes_of(
    const StateDict& entries, const StateDict& network,
    const std::function<std::string(const std::string&)>& name_in_network) {
  torch::OrderedDict<std::string, int64_t> counts;
  counts.insert("", 0);
  int64_t most = 0;
  for (const auto& item : entries) {
    if (is_counter(item.key())) continue;
    const at::Tensor& tensor = item.value();
    size_t begin = 0;
    do {
      const std::string prefix = item.key().substr(0, begin);
      const at::Tensor* const own = network.find(name_in_network(item.key().substr(begin)));
      if (own != nullptr && (!tensor.defined() || tensor.sizes() == own->sizes())) {
        if (!counts.contains(prefix)) counts.insert(prefix, 0);
        most = std::max(most, ++counts[prefix]);
      }
      begin = item.key().find('.', begin) + 1;
    } while (begin != 0);
  }
  // Another network may have some of the names.
  if (2 * most < std::ranges::count_if(network.keys(), std::not_fn(is_counter))) return {""};
  std::vector<std::string> best;
  for (const auto& item : counts) {
    if (item.value() == most) best.push_back(item.key());
  }
  if (best.front().empty()) best.resize(1);
  return best;
}

/// A key that leaves out `names` besides what it does already, such as " init_skip=[fc]": each by
/// its shortest beginning that leaves out no other.
/// @param kept the names that remain, each with a dot at its end
std::string setting(const std::string& key, std::vector<std::string> wildcards,
                    const std::vector<std::string>& names, const std::set<std::string>& kept) {
  if (names.empty()) return "";
  std::set<std::string> seen;
  for (const std::string& name : names) {
    const std::string whole = name + ".";
    std::string start;
    do {
      start = whole.substr(0, whole.find('.', start.size()) + 1);
      const auto next = kept.lower_bound(start);
      if (next == kept.end() || !next->starts_with(start)) break;
    } while (start != whole);
    if (seen.insert(start).second) wildcards.push_back(start.substr(0, start.size() - 1));
  }
  return fmt::format(" {}=[{}]", key, fmt::join(wildcards, ","));
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
    const std::string_view bytes = file->bytes();
    if (!detail::is_torch_file(bytes)) {
      // safetensors has no magic number: it begins with 8 bytes of a length, then JSON. No text has
      // the zero byte at the end of the length.
      const bool is_safetensors = bytes.size() > 8 && bytes[7] == '\0' && bytes[8] == '{';
      if (!is_safetensors) throw base::UserError(what_it_is(bytes));
      if (!key.empty()) {
        throw base::UserError(
            fmt::format("safetensors hold one network, and so no key '{}'; leave it out", key));
      }
      return detail::read_safetensors(*file);
    }
    detail::Values values(bytes.size());
    return tensors_of(choose(detail::read_torch_file(*file, values), key));
  } catch (const base::UserError& error) {
    throw base::UserError(fmt::format("weights {}: {}", name.string(), error.what()));
  }
}

LoadReport load_state_dict(torch::nn::Module& whole, const StateDict& saved, LoadOptions options) {
  torch::nn::Module& module = options.into.empty() ? whole : child_of(whole, options.into);
  StateDict present = state_dict(module);
  std::set<std::string> unwrapped_names;
  for (const std::string& name : present.keys()) unwrapped_names.insert(unwrapped(name));
  // Some networks have `fc` and `module.fc`: then all names stay as they are.
  const auto same = [](const std::string& name) { return name; };
  const auto name_of = unwrapped_names.size() == present.size() ? unwrapped : +same;
  present = renamed(present, name_of);
  for (std::string& wildcard : options.skip) wildcard = name_of(wildcard);
  for (std::string& wildcard : options.ignore) wildcard = name_of(wildcard);
  const auto* const model = dynamic_cast<const Model*>(&module);
  const auto name_in_network = [&](const std::string& name) {
    return model == nullptr || present.contains(name) ? name : model->present_name(name);
  };
  StateDict entries = renamed(saved, name_of);
  check_wildcards(options.ignore, entries.keys(), "file");
  for (const std::string& name : entries.keys()) {
    if (is_matched(options.ignore, name)) entries.erase(name);
  }
  const std::vector<std::string> prefixes =
      options.prefix.empty()
          ? prefixes_of(entries, present, name_in_network)
          : std::vector{name_of(options.prefix + (options.prefix.ends_with('.') ? "" : "."))};
  LoadReport report;
  report.prefix = prefixes.front();
  const std::vector<std::string> all = entries.keys();
  if (!options.prefix.empty() && !present.is_empty() &&
      std::ranges::none_of(all,
                           [&](const auto& name) { return name.starts_with(report.prefix); })) {
    throw base::UserError(base::printable(
        fmt::format("no name begins with the prefix '{}':{}", report.prefix, line("names", all)),
        /*kept=*/"\n"));
  }
  std::map<std::string, std::string> found;  // names in the file by those in the network
  std::vector<std::string> names = present.keys();
  std::vector<std::string> unexpected;
  for (const auto& item : entries) {
    const std::string& in_file = item.key();
    const bool is_below = in_file.starts_with(report.prefix);
    const std::string name = is_below ? name_in_network(in_file.substr(report.prefix.size())) : "";
    names.push_back(name);
    const std::string newest = report.prefix + name;
    const bool is_older = in_file != newest && entries.contains(newest);
    const bool is_loaded =
        present.contains(name) && !is_older && found.emplace(name, in_file).second;
    // torch.optim.swa_utils.AveragedModel counts its updates in n_averaged.
    if (is_loaded || !item.value().defined() || ("." + in_file).ends_with(".n_averaged")) continue;
    report.unexpected.push_back(base::printable(in_file));
    const bool is_left_out = !options.into.empty() || is_matched(options.skip, name);
    if (is_below && !is_left_out) unexpected.push_back(in_file);
  }
  check_wildcards(options.skip, names, "network or the file");
  std::vector<std::string> misshapen, unread, wrong;  // wrong: the names of both
  std::set<std::string> fit, fit_in_file;             // names for setting()
  for (const auto& item : present) {
    const std::string& name = item.key();
    const auto at = found.find(name);
    if (is_matched(options.skip, name)) {
      report.skipped.push_back(name);
    } else if (at == found.end()) {
      if (!is_counter(name)) report.missing.push_back(name);
    } else {
      report.loaded.push_back(name);
      const at::Tensor& tensor = entries[at->second];
      if (!tensor.defined()) {
        unread.push_back(fmt::format("{} ({})", name, entries.unread[at->second]));
        wrong.push_back(name);
      } else if (tensor.sizes() != item.value().sizes()) {
        misshapen.push_back(fmt::format("{} ([{}], the network has [{}])", name,
                                        fmt::join(tensor.sizes(), ", "),
                                        fmt::join(item.value().sizes(), ", ")));
        wrong.push_back(name);
      } else if (tensor.is_complex() && !item.value().is_complex()) {
        unread.push_back(fmt::format("{} ({}, the network has {})", name,
                                     c10::toString(tensor.scalar_type()),
                                     c10::toString(item.value().scalar_type())));
        wrong.push_back(name);
      } else if (!is_counter(name)) {
        fit.insert(name + ".");
        fit_in_file.insert(at->second + ".");
      }
    }
  }
  const bool is_clear = prefixes.size() == 1;
  std::string faults = is_clear ? "" : line("prefixes", prefixes);
  if (options.strict) faults += line("missing", report.missing) + line("unexpected", unexpected);
  faults += line("of another shape", misshapen) + line("of a type that is not read", unread);
  if (!faults.empty()) {
    if (!options.keys.empty() && !fit.empty()) {
      wrong.insert(wrong.begin(), report.missing.begin(), report.missing.end());
      faults += "\n  to take the tensors that fit, set" +
                (is_clear ? "" : fmt::format(" {}prefix={}", options.keys, report.prefix)) +
                setting(options.keys + "skip", options.skip, wrong, fit) +
                setting(options.keys + "ignore", options.ignore, unexpected, fit_in_file);
    }
    const std::string which =
        report.prefix.empty() ? "" : fmt::format(" below '{}'", report.prefix);
    const std::string fault =
        is_clear ? fmt::format("the weights{} do not fit the network:", which)
                 : "the file has the network's weights more than once; choose one prefix:";
    throw base::UserError(base::printable(fault + faults, /*kept=*/"\n"));
  }
  const at::NoGradGuard no_grad;
  for (const std::string& name : report.loaded) present[name].copy_(entries[found[name]]);
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
  if (extension == ".safetensors") {
    return write_parts(path, [&](const Sink& sink) { detail::write_safetensors(all, sink); });
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
