#include "records/event_file.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <protozero/pbf_writer.hpp>
#include <system_error>

#include "common/append_file.h"

namespace syncbn::train {
namespace {

using protozero::pbf_writer;

constexpr const char* kPrefix = "events.out.tfevents.";
// Upper bound on buffered bytes: a resumed run may add the records of its whole log.
constexpr size_t kMaxUnwritten = 1 << 20;

// Field numbers of tensorboard/compat/proto/{event,summary,histogram}.proto and
// tensorboard/plugins/hparams/plugin_data.proto.
namespace event {
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
}  // namespace event
namespace value {
constexpr uint32_t kTag = 1, kSimpleValue = 2, kImage = 4, kHistogram = 5, kMetadata = 9;
}  // namespace value
namespace hparams {
constexpr uint32_t kSessionStart = 3, kSessionEnd = 4;
}  // namespace hparams

constexpr uint32_t kSummaryValue = 1;

/// The table of CRC-32C (Castagnoli) for one byte at a time; RFC 3720, appendix B.4.
constexpr std::array<uint32_t, 256> kCrcTable = [] {
  constexpr uint32_t kReversedPolynomial = 0x82f63b78;
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? kReversedPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}();

/// The checksum of a TFRecord: masked, since the CRC of data that contains CRCs is weak.
uint32_t masked_crc(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char byte : bytes) {
    crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8;
}

template <class Number>
std::string raw_bytes(Number number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

std::string protobuf_message(const std::function<void(pbf_writer&)>& fill) {
  std::string bytes;
  pbf_writer writer(bytes);
  fill(writer);
  return bytes;
}

/// proto3 has UTF-8 only, but names of files, folders and classes may be anything.
void add_text(pbf_writer& to, uint32_t field, std::string_view text) {
  to.add_string(field, base::printable(text, "\t\n\r"));
}

std::string tag_of(const LogRecord& record, const std::string& name) {
  for (const std::string split : {"train", "val", "test"}) {
    if (name.starts_with(split + "_")) return split + "/" + name.substr(split.size() + 1);
  }
  return record.event + "/" + name;
}

/// A google.protobuf.Value.
std::string protobuf_value(const config::Value& value) {
  constexpr uint32_t kNumber = 2, kString = 3, kBool = 4;
  return protobuf_message([&](pbf_writer& writer) {
    const auto number = base::parse_number<double>(value.scalar);
    if (!value.quoted && number) {
      writer.add_double(kNumber, *number);
    } else if (!value.quoted && (value.scalar == "true" || value.scalar == "false")) {
      writer.add_bool(kBool, value.scalar == "true");
    } else {
      add_text(writer, kString, value.scalar);
    }
  });
}

/// Adds each scalar to a map of hyperparameters, by its dotted path.
void add_scalars(pbf_writer& to, const config::Value& value, const std::string& path) {
  constexpr uint32_t kEntry = 1, kKey = 1, kValue = 2;
  if (value.kind == config::Value::Kind::kScalar) {
    pbf_writer entry(to, kEntry);
    add_text(entry, kKey, path);
    entry.add_message(kValue, protobuf_value(value));
  }
  for (size_t i = 0; i < value.list.size(); ++i) {
    add_scalars(to, value.list[i], fmt::format("{}.{}", path, i));
  }
  for (const auto& member : value.members) {
    add_scalars(to, member.value, path.empty() ? member.key : path + "." + member.key);
  }
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder) {
  // TensorBoard reads the files of a folder in the order of their names, and never goes back. The
  // clock of the host that wrote the others may be ahead.
  double time = unix_time();
  for (const auto& other : all_in(folder)) {
    const std::string name = other.filename();
    time = std::max(time, std::floor(std::strtod(&name[std::strlen(kPrefix)], nullptr)) + 1);
  }
  file_ = folder / fmt::format("{}{:.6f}.{}.{}", kPrefix, time, base::hostname(), ::getpid());
  add_event(unix_time(), 0, event::kFileVersion, "brain.Event:2");
}

std::vector<std::filesystem::path> EventFile::all_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().starts_with(kPrefix)) files.push_back(entry.path());
  }
  return files;
}

void EventFile::restart_at(int64_t step) {
  constexpr uint32_t kStatus = 1;
  constexpr int32_t kStart = 1;
  add_event(unix_time(), step, event::kSessionLog,
            protobuf_message([&](pbf_writer& log) { log.add_enum(kStatus, kStart); }));
}

void EventFile::add(const LogRecord& record) {
  const auto add_value = [&](pbf_writer& summary, const std::string& tag, double number) {
    pbf_writer one(summary, kSummaryValue);
    add_text(one, value::kTag, tag);
    one.add_float(value::kSimpleValue, static_cast<float>(number));
  };
  add_event(record.time, record.step, event::kSummary, protobuf_message([&](pbf_writer& summary) {
              add_value(summary, record.event + "/epoch", static_cast<double>(record.epoch));
              for (const auto& [name, number] : record.values) {
                add_value(summary, tag_of(record, name), number);
              }
            }));
  if (records_.size() > kMaxUnwritten) write();
}

void EventFile::add_image(const std::string& tag, int64_t step, const data::Image& image,
                          std::string_view png) {
  constexpr uint32_t kHeight = 1, kWidth = 2, kColorspace = 3, kEncoded = 4;
  add_event(unix_time(), step, event::kSummary, protobuf_message([&](pbf_writer& summary) {
              pbf_writer one(summary, kSummaryValue);
              add_text(one, value::kTag, tag);
              pbf_writer all(one, value::kImage);
              all.add_int32(kHeight, static_cast<int32_t>(image.height));
              all.add_int32(kWidth, static_cast<int32_t>(image.width));
              all.add_int32(kColorspace, static_cast<int32_t>(image.channels));
              all.add_bytes(kEncoded, png.data(), png.size());
            }));
}

void EventFile::add_histogram(const std::string& tag, int64_t step, const Histogram& histogram) {
  constexpr uint32_t kMin = 1, kMax = 2, kCount = 3, kSum = 4, kSumOfSquares = 5, kLimits = 6,
                     kCounts = 7;
  add_event(unix_time(), step, event::kSummary, protobuf_message([&](pbf_writer& summary) {
              pbf_writer one(summary, kSummaryValue);
              add_text(one, value::kTag, tag);
              pbf_writer all(one, value::kHistogram);
              all.add_double(kMin, histogram.min);
              all.add_double(kMax, histogram.max);
              all.add_double(kCount, histogram.count);
              all.add_double(kSum, histogram.sum);
              all.add_double(kSumOfSquares, histogram.sum_of_squares);
              all.add_packed_double(kLimits, histogram.limits.begin(), histogram.limits.end());
              all.add_packed_double(kCounts, histogram.counts.begin(), histogram.counts.end());
            }));
}

void EventFile::begin_session(const config::Value& config) {
  constexpr uint32_t kStartTime = 5;
  add_hyperparameters("_hparams_/session_start_info", hparams::kSessionStart,
                      protobuf_message([&](pbf_writer& info) {
                        add_scalars(info, config, "");
                        info.add_double(kStartTime, unix_time());
                      }));
}

void EventFile::end_session() {
  constexpr uint32_t kStatus = 1, kEndTime = 2;
  constexpr int32_t kSuccess = 1;
  add_hyperparameters("_hparams_/session_end_info", hparams::kSessionEnd,
                      protobuf_message([&](pbf_writer& info) {
                        info.add_enum(kStatus, kSuccess);
                        info.add_double(kEndTime, unix_time());
                      }));
}

void EventFile::write() {
  if (!records_.empty()) append_to_file(file_, std::exchange(records_, {}));
}

void EventFile::add_event(double time, int64_t step, uint32_t kind, std::string_view payload) {
  const std::string data = protobuf_message([&](pbf_writer& event) {
    event.add_double(event::kWallTime, time);
    event.add_int64(event::kStep, step);
    event.add_bytes(kind, payload.data(), payload.size());
  });
  // A TFRecord; tensorflow/core/lib/io/record_writer.h
  const std::string length = raw_bytes(uint64_t{data.size()});
  records_ += length + raw_bytes(masked_crc(length)) + data + raw_bytes(masked_crc(data));
}

void EventFile::add_hyperparameters(std::string_view tag, uint32_t kind, std::string_view payload) {
  constexpr uint32_t kPluginData = 1, kPluginName = 1, kContent = 2;
  add_event(unix_time(), 0, event::kSummary, protobuf_message([&](pbf_writer& summary) {
              pbf_writer one(summary, kSummaryValue);
              add_text(one, value::kTag, tag);
              pbf_writer metadata(one, value::kMetadata);
              pbf_writer plugin(metadata, kPluginData);
              plugin.add_string(kPluginName, "hparams");
              plugin.add_message(kContent, protobuf_message([&](pbf_writer& data) {
                                   data.add_message(kind, payload.data(), payload.size());
                                 }));
            }));
}

}  // namespace syncbn::train
