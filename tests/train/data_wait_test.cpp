#include "records/data_wait.h"

#include <gtest/gtest.h>

namespace syncbn::train {
namespace {

TEST(DataWaitTest, IsAMeanOfStepsAndAShareOfTheEpoch) {
  DataWait wait;
  wait.start_epoch();
  wait.add(1);
  wait.add(2);
  EXPECT_EQ(wait.mean_since_last(), 1.5);
  wait.add(6);
  EXPECT_EQ(wait.mean_since_last(), 6);
  EXPECT_EQ(wait.of_epoch(18).seconds, 3);
  EXPECT_EQ(wait.of_epoch(18).share, 0.5);
}

TEST(DataWaitTest, RestartsWithAnEpochAndIsZeroWithoutSteps) {
  DataWait wait;
  wait.add(5);
  wait.start_epoch();
  EXPECT_EQ(wait.mean_since_last(), 0);
  EXPECT_EQ(wait.of_epoch(0).seconds, 0);
  EXPECT_EQ(wait.of_epoch(0).share, 0);
}

}  // namespace
}  // namespace syncbn::train
