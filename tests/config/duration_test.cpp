#include <syncbn/config/duration.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "example.h"

namespace syncbn::config::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct TripOptions {
  Duration rest = Duration::epochs(1);
  std::optional<Duration> limit;
  EpochsOrSteps slow;
  static void describe(Schema<TripOptions>& schema) {
    schema.field("rest", &TripOptions::rest, "between two rests");
    schema.field("limit", &TripOptions::limit, "how long it lasts");
    schema.field("slow", &TripOptions::slow, "until then it is slow").at_most(1000);
  }
};

std::string written(const TripOptions& trip) {
  return to_yaml(Schema<TripOptions>::get().write(trip));
}

TEST(DurationTest, IsReadAndWrittenBackAsItWas) {
  using Unit = Duration::Unit;
  for (const auto& [text, unit, count] : std::vector<std::tuple<std::string, Unit, double>>{
           {"90ep", Unit::kEpochs, 90},
           {"0.5ep", Unit::kEpochs, 0.5},
           {".5ep", Unit::kEpochs, 0.5},
           {"2.ep", Unit::kEpochs, 2},
           {"2000step", Unit::kSteps, 2000},
           {"1000000000000000step", Unit::kSteps, 1e15},
           {"30s", Unit::kSeconds, 30},
           {"500ms", Unit::kSeconds, 0.5},
           {"15min", Unit::kSeconds, 900},
           {"15m", Unit::kSeconds, 900},
           {"1.5h", Unit::kSeconds, 5400},
           {"1d", Unit::kSeconds, 86400},
           {"3650d", Unit::kSeconds, 3650.0 * 86400}}) {
    TripOptions trip;
    EXPECT_THAT(read("rest: " + text + "\n", trip), IsEmpty()) << text;
    EXPECT_EQ(trip.rest.unit, unit) << text;
    EXPECT_EQ(trip.rest.count, count) << text;
    TripOptions back;
    EXPECT_THAT(read(written(trip), back), IsEmpty()) << written(trip);
    EXPECT_EQ(back.rest.text, text);
  }
}

TEST(DurationTest, MayBeAbsent) {
  TripOptions trip;
  EXPECT_EQ(written(trip), "rest: 1ep\nlimit: null\nslow: 0\n");
  EXPECT_THAT(read("limit: 2h\n", trip), IsEmpty());
  ASSERT_TRUE(trip.limit);
  EXPECT_EQ(trip.limit->count, 7200);
  EXPECT_THAT(read("limit: null\n", trip), IsEmpty());
  EXPECT_FALSE(trip.limit);
}

TEST(DurationTest, SaysWhatItExpects) {
  TripOptions trip;
  const auto fault = [&](const std::string& text) -> std::string {
    const auto faults = read("rest: " + text + "\n", trip);
    return faults.size() == 1 ? faults.front() : std::to_string(faults.size()) + " faults";
  };
  for (const std::string text : {"often", "2epochs", "10mn", "'2 h'", "1e3step", "1.2.3ep", "-2ep",
                                 "+2ep", ".ep", "ep", "''", "nanep", "infs"}) {
    const std::string shown = text[0] == '\'' ? text : "'" + text + "'";
    EXPECT_EQ(fault(text),
              "car.yaml:1:7: rest: expected a duration, such as 0.5ep, 500step, 30s, 15min, 11h "
              "or 1d, got " +
                  shown);
  }
  EXPECT_EQ(fault("[2ep]"),
            "car.yaml:1:7: rest: expected a duration, such as 0.5ep, 500step, 30s, 15min, 11h or "
            "1d, got a list");
  EXPECT_EQ(fault("15"),
            "car.yaml:1:7: rest: expected a duration, got '15' without a unit; write 15ep, "
            "15step, 15ms, 15s, 15m, 15min, 15h or 15d");
  EXPECT_EQ(fault("0.0ep"), "car.yaml:1:7: rest: must be above 0, got '0.0ep'");
  EXPECT_EQ(fault("1.5step"), "car.yaml:1:7: rest: must be a whole number of steps, got '1.5step'");
  EXPECT_EQ(fault("1000001ep"), "car.yaml:1:7: rest: must be at most 1000000ep, got '1000001ep'");
  EXPECT_EQ(fault("3651d"), "car.yaml:1:7: rest: must be at most 3650d, got '3651d'");
  EXPECT_EQ(trip.rest.count, 1);
}

TEST(TimeTest, IsANumberOfSecondsOrHasAUnit) {
  using std::chrono::milliseconds;
  for (const auto& [text, time] : std::vector<std::pair<std::string, std::optional<milliseconds>>>{
           {"0", milliseconds(0)},
           {"5", milliseconds(5000)},
           {"0.25", milliseconds(250)},
           {"500ms", milliseconds(500)},
           {"300s", milliseconds(300'000)},
           {"5m", milliseconds(300'000)},
           {"5min", milliseconds(300'000)},
           {"1.5h", milliseconds(5'400'000)},
           {"1d", milliseconds(86'400'000)},
           {"1e3", std::nullopt},
           {"-1", std::nullopt},
           {"2ep", std::nullopt},
           {"2step", std::nullopt},
           {"1w", std::nullopt},
           {"m", std::nullopt},
           {"", std::nullopt},
           {"99999999999999999h", std::nullopt}}) {
    EXPECT_EQ(parse_time(text), time) << text;
  }
}

TEST(EpochsOrStepsTest, AreReadAndWrittenBackAsTheyWere) {
  for (const auto& [text, epochs] : std::vector<std::pair<std::string, double>>{
           {"0", 0}, {"5", 5}, {"1.5", 1.5}, {"0.5ep", 0.5}, {"250step", 2.5}}) {
    TripOptions trip;
    EXPECT_THAT(read("slow: " + text + "\n", trip), IsEmpty()) << text;
    EXPECT_EQ(trip.slow.epochs(100), epochs) << text;
    EXPECT_EQ(trip.slow.text, text);
    EXPECT_EQ(written(trip), "rest: 1ep\nlimit: null\nslow: " + text + "\n");
  }
}

TEST(EpochsOrStepsTest, SayWhatTheyExpect) {
  TripOptions trip;
  for (const std::string text : {"often", "15min", "'5'", "2epochs"}) {
    const std::string shown = text[0] == '\'' ? text : "'" + text + "'";
    EXPECT_THAT(
        read("slow: " + text + "\n", trip),
        ElementsAre("car.yaml:1:7: slow: expected epochs (5, 0.5ep) or steps (2000step), got " +
                    shown));
  }
  EXPECT_THAT(read("slow: 1.5step\n", trip),
              ElementsAre("car.yaml:1:7: slow: must be a whole number of steps, got '1.5step'"));
  EXPECT_THAT(read("slow: 1001\n", trip).size(), 1U);
}

}  // namespace
}  // namespace syncbn::config::test
