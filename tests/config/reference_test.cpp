#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/config/reference.h>

#include "example.h"

namespace syncbn::config::test {
namespace {

using ::testing::HasSubstr;

std::vector<FieldInfo> fields_of_car() {
  std::vector<FieldInfo> fields;
  Schema<CarOptions>::get().info("", fields);
  return fields;
}

TEST(ReferenceTest, GroupsKeysBySectionAndAlternative) {
  const auto groups = group_fields(fields_of_car());
  std::vector<std::string> names;
  names.reserve(groups.size());
  for (const FieldGroup& group : groups) {
    names.push_back(fmt::format("{}|{}", group.section, fmt::join(group.types, ",")));
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("|", "wheel|", "engine|", "engine|diesel", "engine|electric"));
}

TEST(ReferenceTest, AlternativesWithTheSameFieldsShareATable) {
  FieldInfo type;
  type.path = "model.type";
  type.alternatives = {{"big", "a network"}, {"other", "another one"}, {"small", "a network"}};
  std::vector<FieldInfo> fields = {type};
  for (const std::string name : {"big", "other", "small"}) {
    FieldInfo& width = fields.emplace_back();
    width.path = "model.width";
    width.default_value = name == "other" ? "3" : "2";
    width.only_for = "type: " + name;
  }
  const std::string text = markdown_reference(fields);
  EXPECT_THAT(text, HasSubstr("- `big`, `small`: a network\n- `other`: another one\n"));
  EXPECT_THAT(text, HasSubstr("### `model` with `type: big` and others\n\nFor `big`, `small`.\n"));
  EXPECT_THAT(text, HasSubstr("### `model` with `type: other`\n\n| key"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("type: small")));
}

TEST(ReferenceTest, WritesATableRowForEveryKey) {
  const std::string text = markdown_reference(fields_of_car());
  for (const FieldInfo& field : fields_of_car()) {
    EXPECT_THAT(text, HasSubstr("| `" + field.path + "` |"));
  }
  EXPECT_THAT(text,
              HasSubstr("| `wheel.radius` | number | `0.5` | above 0 | m | from hub to rim |"));
  EXPECT_THAT(text, HasSubstr("### `engine` with `type: electric`"));
  EXPECT_THAT(text, HasSubstr("- `electric`: hums\n"));
}

TEST(ReferenceTest, EscapesBarsThatWouldEndATableCell) {
  EXPECT_THAT(markdown_reference(fields_of_car()),
              HasSubstr("| `sunroof` | true\\|false | `false` |"));
}

}  // namespace
}  // namespace syncbn::config::test
