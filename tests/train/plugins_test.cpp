#include "common/plugins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/train/schedule.h>

#include <memory>
#include <stdexcept>

namespace syncbn::train {
namespace {

using ::testing::ThrowsMessage;

struct NoOptions {
  static void describe(config::Schema<NoOptions>& /*schema*/) {}
};

void register_schedule(const std::string& name) {
  ScheduleKind::registry().add<NoOptions>(
      name, "", [](const NoOptions&, const ScheduleArgs&) { return std::unique_ptr<Schedule>(); });
}

TEST(PluginsTest, RegistersInThePluginsName) {
  register_from("libone.so", [] { register_schedule("one"); });
  register_from("", [] { register_schedule("own"); });
  const auto& entries = ScheduleKind::registry().entries();
  EXPECT_EQ(entries.at("one").origin, "libone.so");
  EXPECT_EQ(entries.at("own").origin, "");
  EXPECT_EQ(entries.at("cosine").origin, "");
}

TEST(PluginsTest, NamesWhoFailsAndWhoWasFirst) {
  EXPECT_THAT([] { register_from("", [] { register_schedule("cosine"); }); },
              ThrowsMessage<base::UserError>(
                  "cannot register what this program has: the schedule 'cosine' is registered "
                  "already, by this program; choose another name"));
  register_from("libone.so", [] { register_schedule("one"); });
  EXPECT_THAT([] { register_from("libtwo.so", [] { register_schedule("one"); }); },
              ThrowsMessage<base::UserError>("cannot load libtwo.so: the schedule 'one' is "
                                             "registered already, by libone.so; choose another "
                                             "name"));
  EXPECT_THAT(
      [] { register_from("libtwo.so", [] { throw 2; }); },
      ThrowsMessage<base::UserError>("cannot load libtwo.so: it threw an exception that does "
                                     "not derive from std::exception"));
}

}  // namespace
}  // namespace syncbn::train
