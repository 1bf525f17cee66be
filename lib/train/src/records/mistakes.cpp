#include "records/mistakes.h"

#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "common/csv.h"
#include "common/gathered.h"
#include "common/naming.h"

namespace syncbn::train {
namespace {

std::vector<Mistake> mistakes_of(const at::Tensor& verdicts, const std::vector<int64_t>& samples) {
  std::vector<Mistake> all;
  const double* values = verdicts.const_data_ptr<double>();
  for (size_t i = 0; i < samples.size(); ++i, values += 3) {
    if (values[1] == values[2]) continue;
    all.push_back({.sample = samples[i],
                   .label = static_cast<int64_t>(values[1]),
                   .answer = static_cast<int64_t>(values[2]),
                   .loss = values[0]});
  }
  return all;
}

void keep_worst(std::vector<Mistake>& mistakes) {
  constexpr size_t kMaxMistakes = 24;
  std::ranges::sort(mistakes, [](const Mistake& a, const Mistake& b) {
    return a.loss != b.loss ? a.loss > b.loss : a.sample < b.sample;
  });
  if (mistakes.size() > kMaxMistakes) mistakes.resize(kMaxMistakes);
}

}  // namespace

std::vector<Mistake> worst_mistakes(const at::Tensor& verdicts,
                                    const std::vector<int64_t>& samples) {
  std::vector<Mistake> own = mistakes_of(verdicts, samples);
  // A diverged network's losses may be NaN, which has no order.
  std::erase_if(own, [](const Mistake& one) { return std::isnan(one.loss); });
  keep_worst(own);
  std::vector<Mistake> all = gathered(std::span<const Mistake>(own));
  keep_worst(all);
  return all;
}

std::string mistakes_table(const std::vector<Mistake>& mistakes,
                           const std::vector<std::string>& classes,
                           const std::function<std::string(int64_t sample)>& name_of) {
  const auto class_at = [&](int64_t label) { return csv_field(class_name(classes, label)); };
  std::string text = "sample,label,answer,loss,name\n";
  for (const Mistake& one : mistakes) {
    text += fmt::format("{},{},{},{:.6g},{}\n", one.sample, class_at(one.label),
                        class_at(one.answer), one.loss, csv_field(name_of(one.sample)));
  }
  return text;
}

}  // namespace syncbn::train
