#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <syncbn/models/model.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// An exponential moving average of a model's parameters and floating-point buffers, as
/// torchvision's references and timm keep it: average += (1 - decay) * (value - average). Other
/// buffers are copied. Equal on all ranks. Not thread-safe.
class Ema {
 public:
  Ema(const EmaConfig& config, const models::Model& model);

  /// Updates the averages with the model's present values.
  /// @param step steps of the run so far, this one included
  /// @param copies whether to copy the values instead, as before ema.start
  void update(int64_t step, bool copies);

  /// The averages, by the model's names.
  const std::map<std::string, at::Tensor>& state() const { return averages_; }
  void load(const std::map<std::string, at::Tensor>& state);

  /// While one lives, the model holds the averages instead of its own values.
  class InPlace {
   public:
    explicit InPlace(Ema& ema) : ema_(ema) { ema_.swap(); }
    ~InPlace() { ema_.swap(); }
    InPlace(const InPlace&) = delete;
    InPlace& operator=(const InPlace&) = delete;

   private:
    Ema& ema_;
  };

 private:
  void swap();

  const EmaConfig config_;
  std::map<std::string, at::Tensor> averages_;
  // In the same order: first those that are averaged, then those that are copied.
  std::vector<at::Tensor> values_;
  std::vector<at::Tensor> average_list_;
  size_t averaged_ = 0;
};

}  // namespace syncbn::train
