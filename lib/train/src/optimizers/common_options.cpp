#include "optimizers/common_options.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <string_view>

namespace syncbn::train {

void ParameterGroup::describe(config::Schema<ParameterGroup>& schema) {
  schema.field("match", &ParameterGroup::match, "norm, bias, or wildcards on names of parameters")
      .required();
  schema.field("lr", &ParameterGroup::lr,
               "learning rate, or a factor such as 0.1x of the optimizer's");
  schema.field("weight_decay", &ParameterGroup::weight_decay, "in place of the optimizer's")
      .between(0, kMaxRate);
}

}  // namespace syncbn::train

namespace syncbn::config {

bool Codec<train::GroupRate>::read(const Value& value, train::GroupRate& out,
                                   const std::string& path, Faults& faults) {
  std::string_view text = value.scalar;
  const bool is_factor = text.ends_with('x');
  if (is_factor) text.remove_suffix(1);
  const auto number = base::parse_number<double>(text);
  if (value.kind != Value::Kind::kScalar || !number ||
      !(*number >= 0 && *number <= train::kMaxRate)) {
    detail::wrong_type(value, path,
                       "a learning rate such as 0.01, or a factor of the optimizer's such as 0.1x",
                       faults);
    return false;
  }
  out = {.value = *number, .is_factor = is_factor};
  return true;
}

Value Codec<train::GroupRate>::write(const train::GroupRate& in) {
  return Value::of_scalar(fmt::format("{}{}", in.value, in.is_factor ? "x" : ""));
}

Value Codec<train::GroupRate>::json_schema(Definitions&) {
  Value rate = detail::map_of("type", Value::of_scalar("number", /*quoted=*/true));
  rate.set("minimum", Value::of_scalar("0"));
  Value factor = detail::map_of("type", Value::of_scalar("string", /*quoted=*/true));
  factor.set("pattern", Value::of_scalar("^[0-9]*\\.?[0-9]+(e-?[0-9]+)?x$", /*quoted=*/true));
  return detail::map_of("anyOf", detail::list_of({std::move(rate), std::move(factor)}));
}

}  // namespace syncbn::config
