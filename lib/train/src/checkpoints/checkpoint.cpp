#include <syncbn/train/checkpoint.h>

#include <ATen/core/jit_type.h>
#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <utility>

#include "checkpoints/sealed_archive.h"
#include "common/out_of_memory.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

constexpr int64_t kOrderVersion = 2;  // the first SamplerState with an order

at::Tensor own_copy(const at::Tensor& tensor) {
  const at::Tensor host = on_host(tensor);
  return host.is_alias_of(tensor) ? host.clone() : host;
}

Dict to_item(const data::SamplerState& state) {
  Dict dict = make_dict();
  put(dict, "version", state.version);
  put(dict, "seed", state.seed);
  put(dict, "epoch", state.epoch);
  put(dict, "consumed", state.consumed);
  put(dict, "fingerprint", state.fingerprint);
  if (state.version >= kOrderVersion) put(dict, "order", state.order);
  return dict;
}

at::Tensor to_item(const at::Tensor& tensor) {
  return on_host(tensor);
}

Dict to_item(const Checkpoint::Best& best) {
  Dict dict = make_dict();
  put(dict, "value", best.value);
  if (best.loss) put(dict, "loss", *best.loss);
  put(dict, "epoch", best.epoch);
  put(dict, "step", best.step);
  put(dict, "file", best.file);
  return dict;
}

template <class T>
const T& to_item(const T& item) {
  return item;
}

template <class T>
Dict to_item(const std::map<std::string, T>& items) {
  Dict dict = make_dict();
  for (const auto& [name, item] : items) put(dict, name, to_item(item));
  return dict;
}

template <class T>
c10::IValue to_list(const std::vector<T>& items) {
  // Generic, since Python's weights_only refuses typed lists.
  c10::impl::GenericList list(c10::AnyType::get());
  for (const T& item : items) list.push_back(to_item(item));
  return list;
}

/// Reads a dictionary. Throws libtorch's exceptions if a key is missing or has another type.
class Reader {
 public:
  explicit Reader(const c10::IValue& value) : dict_(value.toGenericDict()) {}

  c10::IValue get(const std::string& key) const { return dict_.at(c10::IValue(key)); }
  bool has(const std::string& key) const { return dict_.contains(c10::IValue(key)); }
  int64_t integer(const std::string& key) const { return get(key).toInt(); }
  double number(const std::string& key) const { return get(key).toDouble(); }
  std::string text(const std::string& key) const { return get(key).toStringRef(); }
  Reader section(const std::string& key) const { return Reader(get(key)); }
  /// Empty if the key is missing.
  template <class T>
  std::vector<T> list(const std::string& key) const {
    std::vector<T> all;
    if (!has(key)) return all;
    for (const c10::IValue& item : get(key).toListRef()) all.push_back(item.to<T>());
    return all;
  }

  template <class T>
  std::map<std::string, T> items() const {
    std::map<std::string, T> all;
    for (const auto& entry : dict_) all[entry.key().toStringRef()] = entry.value().to<T>();
    return all;
  }

  OptimizerState state() const {
    OptimizerState all;
    for (const auto& entry : dict_) {
      all[entry.key().toStringRef()] = Reader(entry.value()).items<at::Tensor>();
    }
    return all;
  }

 private:
  Dict dict_;
};

data::SamplerState read_sampler(const Reader& reader) {
  data::SamplerState state;
  state.version = reader.integer("version");
  state.seed = reader.integer("seed");
  state.epoch = reader.integer("epoch");
  state.consumed = reader.integer("consumed");
  state.fingerprint = reader.integer("fingerprint");
  if (state.version >= kOrderVersion) state.order = reader.text("order");
  return state;
}

std::vector<Checkpoint::Best> read_best(const Reader& reader) {
  std::vector<Checkpoint::Best> all;
  if (reader.has("best")) {
    for (const c10::IValue& entry : reader.get("best").toListRef()) {
      const Reader best(entry);
      all.push_back({.value = best.number("value"),
                     .epoch = best.integer("epoch"),
                     .step = best.has("step") ? best.integer("step") : 0,
                     .file = best.text("file")});
      if (best.has("loss")) all.back().loss = best.number("loss");
    }
  } else if (reader.number("best_accuracy") >= 0) {  // of version 0.2
    all.push_back({.value = reader.number("best_accuracy"),
                   .epoch = reader.integer("best_epoch"),
                   .file = "best.pt"});
  }
  return all;
}

Checkpoint read_checkpoint(const Reader& reader) {
  Checkpoint checkpoint;
  checkpoint.model = reader.section("model").items<at::Tensor>();
  if (reader.has("ema")) checkpoint.ema = reader.section("ema").items<at::Tensor>();
  checkpoint.has_optimizer = reader.has("optimizer");
  if (checkpoint.has_optimizer) checkpoint.optimizer = reader.section("optimizer").state();
  if (reader.has("scaler")) checkpoint.scaler = reader.section("scaler").items<at::Tensor>();
  if (reader.has("schedule")) checkpoint.schedule = reader.section("schedule").items<double>();
  if (reader.has("lr_scale")) checkpoint.lr_scale = reader.number("lr_scale");
  if (reader.has("restores")) checkpoint.restores = reader.integer("restores");
  checkpoint.step = reader.integer("step");
  checkpoint.sampler = read_sampler(reader.section("sampler"));
  checkpoint.epoch_loss = reader.number("epoch_loss");
  checkpoint.epoch_samples = reader.integer("epoch_samples");
  checkpoint.world_size = reader.integer("world_size");
  reader.get("rng_states");  // throws without it: the run would go on with other random numbers
  checkpoint.rng_states = reader.list<at::Tensor>("rng_states");
  checkpoint.rank_buffers = reader.list<at::Tensor>("rank_buffers");
  checkpoint.epoch_counts = reader.list<int64_t>("epoch_counts");
  checkpoint.best = read_best(reader);
  if (reader.has("best_metric")) checkpoint.best_metric = reader.text("best_metric");
  if (reader.has("improved_to")) checkpoint.improved_to = reader.number("improved_to");
  if (reader.has("stale_evaluations")) {
    checkpoint.stale_evaluations = reader.integer("stale_evaluations");
  }
  checkpoint.seconds = reader.number("seconds");
  if (reader.has("epoch_line")) checkpoint.epoch_line = reader.text("epoch_line");
  checkpoint.config = reader.text("config");
  checkpoint.classes = reader.list<std::string>("classes");
  checkpoint.category_ids = reader.list<int64_t>("category_ids");
  return checkpoint;
}

Dict to_dict(const Checkpoint& checkpoint) {
  Dict dict = make_dict();
  put(dict, "format", std::string(Checkpoint::kFormat));
  put(dict, "format_version", Checkpoint::kFormatVersion);
  put(dict, "model", to_item(checkpoint.model));
  if (!checkpoint.ema.empty()) put(dict, "ema", to_item(checkpoint.ema));
  if (checkpoint.has_optimizer) put(dict, "optimizer", to_item(checkpoint.optimizer));
  if (!checkpoint.scaler.empty()) put(dict, "scaler", to_item(checkpoint.scaler));
  if (!checkpoint.schedule.empty()) put(dict, "schedule", to_item(checkpoint.schedule));
  put(dict, "lr_scale", checkpoint.lr_scale);
  put(dict, "restores", checkpoint.restores);
  put(dict, "step", checkpoint.step);
  put(dict, "sampler", to_item(checkpoint.sampler));
  put(dict, "epoch_loss", checkpoint.epoch_loss);
  put(dict, "epoch_samples", checkpoint.epoch_samples);
  put(dict, "epoch_counts", to_list(checkpoint.epoch_counts));
  put(dict, "world_size", checkpoint.world_size);
  put(dict, "rng_states", to_list(checkpoint.rng_states));
  if (!checkpoint.rank_buffers.empty()) {
    put(dict, "rank_buffers", to_list(checkpoint.rank_buffers));
  }
  put(dict, "best_metric", checkpoint.best_metric);
  put(dict, "best", to_list(checkpoint.best));
  if (checkpoint.improved_to) put(dict, "improved_to", *checkpoint.improved_to);
  put(dict, "stale_evaluations", checkpoint.stale_evaluations);
  put(dict, "seconds", checkpoint.seconds);
  put(dict, "epoch_line", checkpoint.epoch_line);
  put(dict, "config", checkpoint.config);
  put(dict, "classes", to_list(checkpoint.classes));
  if (!checkpoint.category_ids.empty()) {
    put(dict, "category_ids", to_list(checkpoint.category_ids));
  }
  return dict;
}

}  // namespace

std::string serialize(const Checkpoint& checkpoint) {
  return sealed_archive(to_dict(checkpoint));
}

void write_checkpoint(const Checkpoint& checkpoint, const std::filesystem::path& path) {
  write_sealed_archive(to_dict(checkpoint), path);
}

Checkpoint copy_to_host(const Checkpoint& checkpoint) {
  Checkpoint copy = checkpoint;
  for (auto* tensors : {&copy.model, &copy.ema, &copy.scaler}) {
    for (auto& [name, tensor] : *tensors) tensor = own_copy(tensor);
  }
  for (auto& [parameter, tensors] : copy.optimizer) {
    for (auto& [name, tensor] : tensors) tensor = own_copy(tensor);
  }
  for (auto* tensors : {&copy.rng_states, &copy.rank_buffers}) {
    for (at::Tensor& tensor : *tensors) tensor = own_copy(tensor);
  }
  return copy;
}

Checkpoint parse_checkpoint(const std::string& bytes, const std::string& name) {
  int64_t version = 0;
  std::optional<Checkpoint> checkpoint;
  try {
    if (!is_sealed(bytes)) throw base::UserError("wrong checksum");
    const Reader reader(models::parse_torch_values(bytes));
    if (reader.text("format") != Checkpoint::kFormat) throw base::UserError("another format");
    version = reader.integer("format_version");
    if (version == Checkpoint::kFormatVersion) checkpoint = read_checkpoint(reader);
  } catch (const std::exception& error) {
    throw_if_out_of_memory(MemoryUse::kLater, error);  // the checkpoint may be whole
    // Replaces libtorch's message, which names its own source lines.
    throw base::UserError(fmt::format(
        "{} is not a whole checkpoint of train ({}): {}", name, base::format_bytes(bytes.size()),
        is_of_python(bytes)
            ? "it is of Python's torch.save; to begin with its weights, set init=" + name
            : what_it_is(bytes)));
  }
  if (!checkpoint) {
    throw NewerCheckpointError(fmt::format(
        "{} is the checkpoint of a newer version of train (it has format {}, this version "
        "reads {}); use that version",
        name, version, Checkpoint::kFormatVersion));
  }
  for (const Checkpoint::Best& best : checkpoint->best) {
    if (run_files::is_best(best.file)) continue;
    throw base::UserError(
        fmt::format("{0} names '{1}' among the best checkpoints of its run, which are best.pt and "
                    "best-STEP.pt, and train writes no others; to begin with its weights, set "
                    "init={0}",
                    name, base::printable(best.file)));
  }
  return *std::move(checkpoint);
}

}  // namespace syncbn::train
