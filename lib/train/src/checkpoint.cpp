#include <syncbn/train/checkpoint.h>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <string_view>

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

std::string checksum(std::string_view bytes) {
  return fmt::format("{:08x}",
                     crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

/// Appends the checksum to an archive that has no comment yet.
void seal(std::string& archive) {
  // The last two bytes of an archive are the length of its comment, little-endian.
  archive[archive.size() - 2] = static_cast<char>(kChecksum.size() + kDigits);
  archive += kChecksum;
  archive += checksum(archive);
}

bool is_sealed(std::string_view bytes) {
  if (bytes.size() < kChecksum.size() + kDigits) return false;
  const std::string_view content = bytes.substr(0, bytes.size() - kDigits);
  return content.ends_with(kChecksum) && bytes.substr(content.size()) == checksum(content);
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

/// A copy on the CPU with a storage of its own, since the pickler writes whole storages.
at::Tensor own_copy(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous().clone();
}

Dict to_dict(const std::map<std::string, at::Tensor>& tensors) {
  Dict dict = make_dict();
  for (const auto& [name, tensor] : tensors) put(dict, name, own_copy(tensor));
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
  for (const at::Tensor& tensor : tensors) list.push_back(own_copy(tensor));
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

Checkpoint read_checkpoint(const Reader& reader) {
  Checkpoint checkpoint;
  checkpoint.model = reader.section("model").tensors();
  checkpoint.optimizer = reader.section("optimizer").state();
  checkpoint.step = reader.integer("step");
  checkpoint.sampler = read_sampler(reader.section("sampler"));
  checkpoint.epoch_loss = reader.number("epoch_loss");
  checkpoint.epoch_samples = reader.integer("epoch_samples");
  checkpoint.world_size = reader.integer("world_size");
  for (const c10::IValue& state : reader.get("rng_states").toListRef()) {
    checkpoint.rng_states.push_back(state.toTensor());
  }
  checkpoint.best_accuracy = reader.number("best_accuracy");
  checkpoint.best_epoch = reader.integer("best_epoch");
  checkpoint.seconds = reader.number("seconds");
  if (reader.has("epoch_line")) checkpoint.epoch_line = reader.text("epoch_line");
  checkpoint.config = reader.text("config");
  return checkpoint;
}

}  // namespace

std::string serialize(const Checkpoint& checkpoint) {
  Dict dict = make_dict();
  put(dict, "format", std::string(kFormat));
  put(dict, "format_version", Checkpoint::kFormatVersion);
  put(dict, "model", to_dict(checkpoint.model));
  put(dict, "optimizer", to_dict(checkpoint.optimizer));
  put(dict, "step", checkpoint.step);
  put(dict, "sampler", to_dict(checkpoint.sampler));
  put(dict, "epoch_loss", checkpoint.epoch_loss);
  put(dict, "epoch_samples", checkpoint.epoch_samples);
  put(dict, "world_size", checkpoint.world_size);
  put(dict, "rng_states", to_list(checkpoint.rng_states));
  put(dict, "best_accuracy", checkpoint.best_accuracy);
  put(dict, "best_epoch", checkpoint.best_epoch);
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

  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  torch::jit::writeArchiveAndTensors("data", pickled.data(), pickled.size(), pickler.tensorData(),
                                     writer);
  writer.writeEndOfFile();
  seal(bytes);
  return bytes;
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
