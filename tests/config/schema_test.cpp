#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "example.h"
#include "support/thrown.h"

namespace syncbn::config::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(SchemaTest, KeepsDefaultsOfKeysThatAreNotWritten) {
  CarOptions car;
  EXPECT_THAT(read("doors: 5\n", car), IsEmpty());
  EXPECT_EQ(car.doors, 5);
  EXPECT_EQ(car.colour, "red");
  EXPECT_FALSE(car.seats);
  EXPECT_EQ(car.engine.type(), "diesel");
}

TEST(SchemaTest, ReadsEverySortOfField) {
  CarOptions car;
  EXPECT_THAT(read("name: 123\ncolour: green\ndoors: 2\nseats: 2\nsunroof: true\n"
                   "wheel: {radius: 0.25, bolts: [3, 4]}\n"
                   "engine: {type: electric, range: 500, plug: \"2\"}\n",
                   car),
              IsEmpty());
  EXPECT_EQ(car.name, "123");
  EXPECT_EQ(car.seats, 2);
  EXPECT_TRUE(car.sunroof);
  EXPECT_EQ(car.wheel.radius, 0.25);
  EXPECT_THAT(car.wheel.bolts, ElementsAre(3, 4));
  EXPECT_EQ(car.engine.make(30), "electric 500 km by 2 at 30");
}

struct CrewOptions {
  OrAuto<int64_t> people;
  static void describe(Schema<CrewOptions>& schema) {
    schema.field("people", &CrewOptions::people, "how many travel").at_least(1);
  }
};

TEST(SchemaTest, AutoStandsForAValueThatTheProgramChooses) {
  CrewOptions crew;
  const auto written = [&] { return to_yaml(Schema<CrewOptions>::get().write(crew)); };
  EXPECT_THAT(read("people: 3\n", crew), IsEmpty());
  EXPECT_EQ(crew.people.value, 3);
  EXPECT_EQ(written(), "people: 3\n");
  EXPECT_THAT(read("people: auto\n", crew), IsEmpty());
  EXPECT_FALSE(crew.people.value);
  EXPECT_EQ(written(), "people: auto\n");
  EXPECT_THAT(read("people: 0\n", crew),
              ElementsAre("car.yaml:1:9: people: must be at least 1, got 0"));
  EXPECT_THAT(read("people: many\n", crew),
              ElementsAre("car.yaml:1:9: people: expected one integer or auto, got 'many'"));
}

TEST(SchemaTest, SaysAllFaultsAtOnceWithTheirPlaces) {
  CarOptions car;
  EXPECT_THAT(
      read("dors: 4\n"
           "colour: gren\n"
           "doors: 6\n"
           "seats: many\n"
           "sunroof: 1\n"
           "wheel:\n"
           "  radius: 0\n"
           "  bolts: 4\n"
           "engine:\n"
           "  type: desel\n",
           car),
      ElementsAre("car.yaml:1:1: unknown key 'dors'; did you mean 'doors'?",
                  "car.yaml:2:9: colour: must be one of red, green, got 'gren'; did you "
                  "mean 'green'?",
                  "car.yaml:3:8: doors: must be at least 2, at most 5, got 6",
                  "car.yaml:4:8: seats: expected an integer, got 'many'",
                  "car.yaml:5:10: sunroof: expected true or false, got '1'",
                  "car.yaml:7:11: wheel.radius: must be above 0, got 0",
                  "car.yaml:8:10: wheel.bolts: expected a list, as [4], got '4'",
                  "car.yaml:10:9: engine.type: unknown type 'desel'; did you mean 'diesel'?"));
}

TEST(SchemaTest, RefusesNumbersOfTheWrongSort) {
  CarOptions car;
  EXPECT_THAT(read("doors: 4.0\n", car),
              ElementsAre("car.yaml:1:8: doors: expected an integer, got '4.0'"));
  EXPECT_THAT(read("doors: 99999999999999999999\n", car),
              ElementsAre("car.yaml:1:8: doors: expected an integer from -9223372036854775808 to "
                          "9223372036854775807, got '99999999999999999999'"));
  EXPECT_THAT(read("wheel: {radius: .nan}\n", car),
              ElementsAre("car.yaml:1:17: wheel.radius: expected a finite number, got '.nan'"));
  EXPECT_THAT(read("doors: +-4\n", car),
              ElementsAre("car.yaml:1:8: doors: expected an integer, got '+-4'"));
  EXPECT_THAT(read("doors:\n", car),
              ElementsAre("car.yaml:1:1: doors: expected an integer, got nothing"));
  EXPECT_EQ(car.doors, 4);
}

TEST(SchemaTest, SaysThatQuotesMakeText) {
  CarOptions car;
  EXPECT_THAT(
      read("doors: \"4\"\nsunroof: 'true'\nwheel: {radius: \"1e-1\"}\nseats: \"many\"\n", car),
      ElementsAre("car.yaml:1:8: doors: expected an integer, got the text '4'; remove its quotes",
                  "car.yaml:2:10: sunroof: expected true or false, got the text 'true'; remove its "
                  "quotes",
                  "car.yaml:3:17: wheel.radius: expected a finite number, got the text '1e-1'; "
                  "remove its quotes",
                  "car.yaml:4:8: seats: expected an integer, got 'many'"));
}

TEST(SchemaTest, CutsLongValuesInMessages) {
  CarOptions car;
  const std::string longest(60, 'x');
  EXPECT_THAT(read("doors: " + longest + "\n", car),
              ElementsAre("car.yaml:1:8: doors: expected an integer, got '" + longest + "'"));
  const std::string text(900, 'x');
  const auto faults = read(
      "doors: " + text + "\ncolour: " + text + "\n" + text + ": 1\nengine: " + text + "\n", car);
  EXPECT_EQ(faults.size(), 4u);
  for (const std::string& fault : faults) {
    EXPECT_THAT(fault, ::testing::HasSubstr("…'"));
    EXPECT_LT(fault.size(), 180u) << fault;
  }
  // Never cuts within a character of two bytes.
  EXPECT_EQ(shortened(std::string(58, 'x') + "äää"), std::string(58, 'x') + "ä…");
}

TEST(SchemaTest, CountsTheValuesOfAListOfFixedLength) {
  CarOptions car;
  EXPECT_THAT(read("wheel: {pressures: [2]}\n", car),
              ElementsAre("car.yaml:1:20: wheel.pressures: must have 2 values, got 1"));
  EXPECT_THAT(read("wheel: {pressures: [2, -1]}\n", car),
              ElementsAre("car.yaml:1:20: wheel.pressures: must be above 0, got -1"));
  EXPECT_THAT(read("wheel: {pressures: [1, 4]}\n", car), IsEmpty());
}

TEST(SchemaTest, ReadsNumbersAsPeopleWriteThem) {
  CarOptions car;
  for (const auto& [text, value] : std::vector<std::pair<std::string, double>>{
           {"1e-1", 0.1}, {"+3", 3}, {".5", 0.5}, {"2.", 2}, {"7", 7}}) {
    EXPECT_THAT(read("wheel: {radius: " + text + "}\n", car), IsEmpty()) << text;
    EXPECT_EQ(car.wheel.radius, value) << text;
  }
}

TEST(SchemaTest, RefusesASectionThatIsNone) {
  CarOptions car;
  EXPECT_THAT(read("wheel: 4\n", car),
              ElementsAre("car.yaml:1:8: wheel: expected a section, got '4'"));
  EXPECT_THAT(read("- a\n", car),
              ElementsAre("car.yaml:1:1: expected lines of the form KEY: VALUE, got a list"));
  EXPECT_THAT(read("doors:4\n", car),
              ElementsAre("car.yaml:1:1: expected lines of the form KEY: VALUE, got 'doors:4'"));
  EXPECT_THAT(read("engine: [diesel]\n", car),
              ElementsAre("car.yaml:1:9: engine: expected a section, got a list"));
  EXPECT_THAT(read("engine: {type: {diesel: 3}}\n", car),
              ElementsAre("car.yaml:1:16: engine.type: expected a name, got a section"));
}

TEST(SchemaTest, SetsOptionsOfTheDefaultTypeWithoutRepeatingIt) {
  CarOptions car;
  EXPECT_THAT(read("engine: {litres: 3}\n", car), IsEmpty());
  EXPECT_EQ(car.engine.make(1), "diesel 3 l at 1");
}

TEST(SchemaTest, TakesATypeAloneForASection) {
  CarOptions car;
  EXPECT_THAT(read("engine: electric\n", car), IsEmpty());
  EXPECT_EQ(car.engine.make(1), "electric 300 km by ccs at 1");
}

TEST(SchemaTest, RefusesKeysOfAnotherAlternative) {
  CarOptions car;
  EXPECT_THAT(read("engine: {type: diesel, range: 3}\n", car),
              ElementsAre("car.yaml:1:24: unknown key 'engine.range'; it belongs to type "
                          "electric, the type here is diesel"));
}

TEST(SchemaTest, ChecksRulesOverSeveralFields) {
  CarOptions car;
  EXPECT_THAT(read("doors: 2\nseats: 5\n", car),
              ElementsAre("car.yaml:1:8: two doors are for two seats"));
}

struct StrictOptions {
  int64_t size = 0;
  static void describe(Schema<StrictOptions>& schema) {
    schema.field("size", &StrictOptions::size, "how large").required();
  }
};

TEST(SchemaTest, NamesARequiredKeyThatIsMissing) {
  StrictOptions options;
  EXPECT_THAT(read("{}\n", options), ElementsAre("car.yaml:1:1: the key 'size' is missing"));
  EXPECT_THAT(read("size: 1\n", options), IsEmpty());
}

TEST(SchemaTest, WritesWhatItReadsBack) {
  CarOptions car;
  ASSERT_THAT(read("name: \"7\"\nseats: 3\nwheel: {bolts: []}\nengine: {type: electric}\n", car),
              IsEmpty());
  const std::string text = to_yaml(Schema<CarOptions>::get().write(car));
  CarOptions back;
  ASSERT_THAT(read(text, back), IsEmpty()) << text;
  EXPECT_EQ(to_yaml(Schema<CarOptions>::get().write(back)), text);
  EXPECT_EQ(back.name, "7");
  EXPECT_EQ(back.engine.type(), "electric");
}

struct CommonOptions {
  int64_t count = 1;
};

struct ToolOptions : CommonOptions {
  std::optional<int64_t> port;
  std::string mode = "fast";
  static void describe(Schema<ToolOptions>& schema) {
    schema.group("Numbers");
    schema.field("count", &ToolOptions::count, "how many").between(1, 9).shown_default("one");
    schema.field("port", &ToolOptions::port, "where").value_name("PORT").letter("-p");
    schema.group("Others");
    schema.field("mode", &ToolOptions::mode, "how").one_of({"fast", "slow"}).environment({"MODE"});
  }
};

TEST(SchemaTest, TellsHowACommandLineSpellsItsFields) {
  std::vector<FieldInfo> fields;
  Schema<ToolOptions>::get().info("", fields);
  ASSERT_EQ(fields.size(), 3u);
  EXPECT_EQ(fields[0].group, "Numbers");
  EXPECT_EQ(fields[0].min, 1);
  EXPECT_EQ(fields[0].max, 9);
  EXPECT_EQ(fields[0].range, "at least 1, at most 9");
  EXPECT_EQ(fields[0].default_value, "one");
  EXPECT_EQ(fields[1].group, "Numbers");
  EXPECT_EQ(fields[1].value_name, "PORT");
  EXPECT_EQ(fields[1].letter, "-p");
  EXPECT_FALSE(fields[1].is_switch());
  EXPECT_EQ(fields[2].group, "Others");
  EXPECT_THAT(fields[2].choices, ElementsAre("fast", "slow"));
  EXPECT_THAT(fields[2].environment, ElementsAre("MODE"));
}

TEST(SchemaTest, ReadsMembersOfABaseClass) {
  ToolOptions tool;
  EXPECT_THAT(read("count: 7\nport: 80\n", tool), IsEmpty());
  EXPECT_EQ(tool.count, 7);
  EXPECT_EQ(tool.port, 80);
  EXPECT_THAT(read("count: 10\n", tool),
              ElementsAre("car.yaml:1:8: count: must be at least 1, at most 9, got 10"));
}

TEST(SchemaTest, ThrowsAllFaultsInOneError) {
  Faults faults;
  faults.throw_if_any();
  faults.add({}, "first");
  faults.add({}, "second");
  EXPECT_EQ(syncbn::test::message_of<base::UserError>([&] { faults.throw_if_any(); }),
            "first\n  second");
}

}  // namespace
}  // namespace syncbn::config::test
