#include <syncbn/train/checkpoint.h>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <functional>
#include <string_view>
#include <utility>

// crc32_z: the checksum at a checkpoint's end.
#include <zlib.h>

namespace syncbn::train {
namespace {

using Dict = c10::impl::GenericDict;

constexpr const char* kFormat = "syncbn-checkpoint";
constexpr int64_t kOrderVersion = 2;  // the first SamplerState that has an order

// A checkpoint ends with the comment of its zip archive: this text, and the CRC-32 of all bytes
// before it in hexadecimal. libtorch does not verify the archive's own checksums, which do not
// cover its table of contents either.
constexpr std::string_view kChecksum = "syncbn crc32 ";
constexpr size_t kDigits = 8;

using Sink = std::function<void(std::string_view bytes)>;

uLong crc_of(std::string_view bytes, uLong before = 0) {
  return crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
}

std::string checksum(uLong crc) {
  return fmt::format("{:08x}", crc);
}

/// Passes an archive that has no comment yet on to a sink, and appends the checksum.
class Sealer {
 public:
  explicit Sealer(Sink sink) : sink_(std::move(sink)) {}

  void write(std::string_view bytes) {
    // The last two bytes of an archive are the length of its comment, which is known at its end.
    held_back_ += bytes.substr(bytes.size() - std::min(bytes.size(), kHeldBack));
    if (bytes.size() >= kHeldBack) {
      pass_on(std::string_view(held_back_).substr(0, held_back_.size() - kHeldBack));
      pass_on(bytes.substr(0, bytes.size() - kHeldBack));
    } else if (held_back_.size() > kHeldBack) {
      pass_on(std::string_view(held_back_).substr(0, held_back_.size() - kHeldBack));
    }
    held_back_.erase(0, held_back_.size() - std::min(held_back_.size(), kHeldBack));
  }

  void seal() {
    held_back_[0] = static_cast<char>(kChecksum.size() + kDigits);  // little-endian
    pass_on(held_back_);
    pass_on(kChecksum);
    sink_(checksum(crc_));
  }

 private:
  static constexpr size_t kHeldBack = 2;

  void pass_on(std::string_view bytes) {
    crc_ = crc_of(bytes, crc_);
    sink_(bytes);
  }

  Sink sink_;
  std::string held_back_;
  uLong crc_ = 0;
};

bool is_sealed(std::string_view bytes) {
  if (bytes.size() < kChecksum.size() + kDigits) return false;
  const std::string_view content = bytes.substr(0, bytes.size() - kDigits);
  return content.ends_with(kChecksum) && bytes.substr(content.size()) == checksum(crc_of(content));
}

/// A whole zip archive without our checksum, or a pickle, as torch.save wrote before 1.6.
bool is_of_python(std::string_view bytes) {
  constexpr std::string_view kEndOfZip = "PK\5\6";
  constexpr size_t kEndSize = 22;  // without a comment
  constexpr std::string_view kPickle = "\x80\x02";
  if (bytes.starts_with(kPickle)) return true;
  return bytes.starts_with("PK") && bytes.size() >= kEndSize &&
         bytes.substr(bytes.size() - kEndSize).starts_with(kEndOfZip);
}

Dict make_dict() {
  return Dict(c10::StringType::get(), c10::AnyType::get());
}

void put(Dict& dict, const std::string& key, c10::IValue value) {
  dict.insert(c10::IValue(key), std::move(value));
}

/// On the CPU with a storage of its own, since the pickler writes whole storages.
at::Tensor on_host(const at::Tensor& tensor) {
  at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
  const bool is_whole = host.storage().nbytes() == host.nbytes() && host.storage_offset() == 0;
  return is_whole ? host : host.clone();
}

at::Tensor own_copy(const at::Tensor& tensor) {
  const at::Tensor host = on_host(tensor);
  return host.is_alias_of(tensor) ? host.clone() : host;
}

Dict to_dict(const std::map<std::string, at::Tensor>& tensors) {
  Dict dict = make_dict();
  for (const auto& [name, tensor] : tensors) put(dict, name, on_host(tensor));
  return dict;
}

Dict to_dict(const std::map<std::string, double>& numbers) {
  Dict dict = make_dict();
  for (const auto& [name, number] : numbers) put(dict, name, number);
  return dict;
}

Dict to_dict(const OptimizerState& state) {
  Dict dict = make_dict();
  for (const auto& [name, tensors] : state) put(dict, name, to_dict(tensors));
  return dict;
}

Dict to_dict(const data::SamplerState& state) {
  Dict dict = make_dict();
  put(dict, "version", state.version);
  put(dict, "seed", state.seed);
  put(dict, "epoch", state.epoch);
  put(dict, "consumed", state.consumed);
  put(dict, "fingerprint", state.fingerprint);
  if (state.version >= kOrderVersion) put(dict, "order", state.order);
  return dict;
}

c10::IValue to_list(const std::vector<at::Tensor>& tensors) {
  // Generic, since Python's weights_only refuses typed lists.
  c10::impl::GenericList list(c10::AnyType::get());
  for (const at::Tensor& tensor : tensors) list.push_back(on_host(tensor));
  return list;
}

c10::IValue to_list(const std::vector<int64_t>& numbers) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const int64_t number : numbers) list.push_back(number);
  return list;
}

c10::IValue to_list(const std::vector<Checkpoint::Best>& all) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Checkpoint::Best& best : all) {
    Dict dict = make_dict();
    put(dict, "value", best.value);
    put(dict, "epoch", best.epoch);
    put(dict, "file", best.file);
    list.push_back(dict);
  }
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

  std::map<std::string, at::Tensor> tensors() const {
    std::map<std::string, at::Tensor> all;
    for (const auto& entry : dict_) all[entry.key().toStringRef()] = entry.value().toTensor();
    return all;
  }

  std::map<std::string, double> numbers() const {
    std::map<std::string, double> all;
    for (const auto& entry : dict_) all[entry.key().toStringRef()] = entry.value().toDouble();
    return all;
  }

  OptimizerState state() const {
    OptimizerState all;
    for (const auto& entry : dict_) {
      all[entry.key().toStringRef()] = Reader(entry.value()).tensors();
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
                     .file = best.text("file")});
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
  checkpoint.model = reader.section("model").tensors();
  if (reader.has("ema")) checkpoint.ema = reader.section("ema").tensors();
  checkpoint.has_optimizer = reader.has("optimizer");
  if (checkpoint.has_optimizer) checkpoint.optimizer = reader.section("optimizer").state();
  if (reader.has("scaler")) checkpoint.scaler = reader.section("scaler").tensors();
  if (reader.has("schedule")) checkpoint.schedule = reader.section("schedule").numbers();
  if (reader.has("lr_scale")) checkpoint.lr_scale = reader.number("lr_scale");
  if (reader.has("restores")) checkpoint.restores = reader.integer("restores");
  checkpoint.step = reader.integer("step");
  checkpoint.sampler = read_sampler(reader.section("sampler"));
  checkpoint.epoch_loss = reader.number("epoch_loss");
  checkpoint.epoch_samples = reader.integer("epoch_samples");
  checkpoint.world_size = reader.integer("world_size");
  for (const c10::IValue& state : reader.get("rng_states").toListRef()) {
    checkpoint.rng_states.push_back(state.toTensor());
  }
  if (reader.has("epoch_counts")) {
    for (const c10::IValue& count : reader.get("epoch_counts").toListRef()) {
      checkpoint.epoch_counts.push_back(count.toInt());
    }
  }
  checkpoint.best = read_best(reader);
  if (reader.has("stale_evaluations")) {
    checkpoint.stale_evaluations = reader.integer("stale_evaluations");
  }
  checkpoint.seconds = reader.number("seconds");
  if (reader.has("epoch_line")) checkpoint.epoch_line = reader.text("epoch_line");
  checkpoint.config = reader.text("config");
  return checkpoint;
}

}  // namespace

namespace {

void serialize(const Checkpoint& checkpoint, const Sink& sink) {
  Dict dict = make_dict();
  put(dict, "format", std::string(kFormat));
  put(dict, "format_version", Checkpoint::kFormatVersion);
  put(dict, "model", to_dict(checkpoint.model));
  if (!checkpoint.ema.empty()) put(dict, "ema", to_dict(checkpoint.ema));
  if (checkpoint.has_optimizer) put(dict, "optimizer", to_dict(checkpoint.optimizer));
  if (!checkpoint.scaler.empty()) put(dict, "scaler", to_dict(checkpoint.scaler));
  if (!checkpoint.schedule.empty()) put(dict, "schedule", to_dict(checkpoint.schedule));
  put(dict, "lr_scale", checkpoint.lr_scale);
  put(dict, "restores", checkpoint.restores);
  put(dict, "step", checkpoint.step);
  put(dict, "sampler", to_dict(checkpoint.sampler));
  put(dict, "epoch_loss", checkpoint.epoch_loss);
  put(dict, "epoch_samples", checkpoint.epoch_samples);
  put(dict, "epoch_counts", to_list(checkpoint.epoch_counts));
  put(dict, "world_size", checkpoint.world_size);
  put(dict, "rng_states", to_list(checkpoint.rng_states));
  put(dict, "best", to_list(checkpoint.best));
  put(dict, "stale_evaluations", checkpoint.stale_evaluations);
  put(dict, "seconds", checkpoint.seconds);
  put(dict, "epoch_line", checkpoint.epoch_line);
  put(dict, "config", checkpoint.config);

  // Not torch::pickle_save(), which tags dictionaries with types: weights_only refuses those.
  std::string pickled;
  const auto append_pickle = [&](const char* data, size_t size) { pickled.append(data, size); };
  torch::jit::Pickler pickler(append_pickle, /*tensor_table=*/nullptr,
                              /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
                              /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  Sealer sealer(sink);
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    sealer.write({static_cast<const char*>(data), size});
    return size;
  });
  torch::jit::writeArchiveAndTensors("data", pickled.data(), pickled.size(), pickler.tensorData(),
                                     writer);
  writer.writeEndOfFile();
  sealer.seal();
}

}  // namespace

std::string serialize(const Checkpoint& checkpoint) {
  std::string bytes;
  serialize(checkpoint, [&](std::string_view part) { bytes += part; });
  return bytes;
}

void write_checkpoint(const Checkpoint& checkpoint, const std::filesystem::path& path) {
  base::write_file_atomically(path, [&](const std::filesystem::path& temporary) {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    // An exception may not pass through libtorch's writer: the error is kept until the end.
    int error = file ? 0 : errno;
    const auto keep_error = [&] {
      if (!file && error == 0) error = errno != 0 ? errno : EIO;
    };
    serialize(checkpoint, [&](std::string_view part) {
      if (error == 0) file.write(part.data(), static_cast<std::streamsize>(part.size()));
      keep_error();
    });
    file.close();
    keep_error();
    if (error != 0) {
      base::throw_file_error(fmt::format("cannot write {}", path.string()), error);
    }
  });
}

Checkpoint copy_to_host(const Checkpoint& checkpoint) {
  Checkpoint copy = checkpoint;
  for (auto* tensors : {&copy.model, &copy.ema, &copy.scaler}) {
    for (auto& [name, tensor] : *tensors) tensor = own_copy(tensor);
  }
  for (auto& [parameter, tensors] : copy.optimizer) {
    for (auto& [name, tensor] : tensors) tensor = own_copy(tensor);
  }
  for (at::Tensor& state : copy.rng_states) state = own_copy(state);
  return copy;
}

Checkpoint parse_checkpoint(const std::string& bytes, const std::string& name) {
  int64_t version = 0;
  try {
    if (!is_sealed(bytes)) throw base::UserError("wrong checksum");
    const Reader reader(torch::jit::pickle_load({bytes.begin(), bytes.end()}));
    if (reader.text("format") != kFormat) throw base::UserError("another format");
    version = reader.integer("format_version");
    if (version == Checkpoint::kFormatVersion) return read_checkpoint(reader);
  } catch (const std::exception&) {
    // Replaces libtorch's message, which names its own source lines.
    throw base::UserError(fmt::format("{} is not a whole checkpoint of train ({}): it is {}", name,
                                      base::format_bytes(bytes.size()),
                                      is_of_python(bytes)
                                          ? "of Python's torch.save, which train cannot resume from"
                                          : "damaged, truncated or another program's"));
  }
  throw base::UserError(fmt::format("{} has checkpoint format {}; this program reads {}", name,
                                    version, Checkpoint::kFormatVersion));
}

}  // namespace syncbn::train
