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
  for (const FieldGroup& group : groups) names.push_back(group.section + "|" + group.only_for);
  EXPECT_THAT(names, ::testing::ElementsAre("|", "wheel|", "engine|", "engine|type: diesel",
                                            "engine|type: electric"));
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
