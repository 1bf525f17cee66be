#include "common/visible_gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class SeeOnlyGpuTest : public ::testing::Test {
 protected:
  SeeOnlyGpuTest() {
    ::unsetenv("LOCAL_WORLD_SIZE");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
  }
  ~SeeOnlyGpuTest() override {
    ::unsetenv("LOCAL_WORLD_SIZE");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    if (former_) ::setenv("CUDA_VISIBLE_DEVICES", former_->c_str(), 1);
  }

  const std::optional<std::string> former_ = base::env("CUDA_VISIBLE_DEVICES");
};

TEST_F(SeeOnlyGpuTest, CountsAmongThoseThatAreVisible) {
  ::setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3", 1);
  see_only_gpu(3);
  EXPECT_EQ(base::env("CUDA_VISIBLE_DEVICES"), "3");
  ::setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1234,6", 1);
  see_only_gpu(1);
  EXPECT_EQ(base::env("CUDA_VISIBLE_DEVICES"), "GPU-1234");
}

TEST_F(SeeOnlyGpuTest, RefusesAGpuThatIsNotVisible) {
  ::setenv("CUDA_VISIBLE_DEVICES", "5,6", 1);
  EXPECT_THAT([] { see_only_gpu(2); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("cuda:2, but CUDA_VISIBLE_DEVICES=5,6 shows only 2 GPUs")));
}

TEST_F(SeeOnlyGpuTest, AnEmptyVariableHidesAll) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_THAT([] { see_only_gpu(0); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("device: cuda:0, but CUDA_VISIBLE_DEVICES= shows no GPU; device=cpu")));
}

TEST_F(SeeOnlyGpuTest, RefusesAGpuThatTheHostLacks) {
  EXPECT_THAT([] { see_only_gpu(1000); }, ThrowsMessage<base::UserError>(::testing::StartsWith(
                                              "device: cuda:1000, but this host has ")));
}

TEST_F(SeeOnlyGpuTest, RefusesSeveralRanksOnAHost) {
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_THAT([] { see_only_gpu(0); },
              ThrowsMessage<base::UserError>(HasSubstr("shows no GPU; device=cpu")));
  ::setenv("CUDA_VISIBLE_DEVICES", "5,6", 1);
  EXPECT_THAT([] { see_only_gpu(0); },
              ThrowsMessage<base::UserError>(HasSubstr("is one GPU, and this host has 2 ranks")));
}

}  // namespace
}  // namespace syncbn::train
