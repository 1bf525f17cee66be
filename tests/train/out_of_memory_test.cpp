#include "common/out_of_memory.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>

#include <new>
#include <stdexcept>
#include <vector>

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(OutOfMemoryTest, IsAMistakeInTheConfiguration) {
  EXPECT_THAT([] { explain_out_of_memory(MemoryUse::kFirstStep, [] { throw std::bad_alloc(); }); },
              ThrowsMessage<base::UserError>(HasSubstr("not enough memory; choose a smaller")));
  EXPECT_THAT(
      [] {
        explain_out_of_memory(MemoryUse::kFirstStep, [] {
          TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
                      4096, " bytes. Error code 12 (Cannot allocate memory)");
        });
      },
      ThrowsMessage<base::UserError>(HasSubstr("not enough memory for 4096 bytes; choose")));
  EXPECT_THAT(
      [] {
        explain_out_of_memory(MemoryUse::kFirstStep, [] {
          TORCH_CHECK_WITH(OutOfMemoryError, false,
                           "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more");
        });
      },
      ThrowsMessage<base::UserError>(HasSubstr("not enough memory for 2.00 GiB; choose")));
}

TEST(OutOfMemoryTest, LaterItIsAFailureThatARestartMayMend) {
  EXPECT_THAT([] { explain_out_of_memory(MemoryUse::kLater, [] { throw std::bad_alloc(); }); },
              ThrowsMessage<base::UnavailableError>(HasSubstr("not enough memory now")));
}

TEST(OutOfMemoryTest, AnImpossibleSizeIsAMistakeInDataAndModelOnly) {
  const auto reserve = [] { std::vector<int>().reserve(~size_t{0}); };
  EXPECT_THROW(explain_out_of_memory(MemoryUse::kSetup, reserve), base::UserError);
  EXPECT_THROW(explain_out_of_memory(MemoryUse::kFirstStep, reserve), std::length_error);
  EXPECT_THROW(explain_out_of_memory(MemoryUse::kLater, reserve), std::length_error);
}

TEST(OutOfMemoryTest, LetsOtherErrorsPass) {
  EXPECT_THROW(
      explain_out_of_memory(MemoryUse::kFirstStep, [] { throw std::runtime_error("other"); }),
      std::runtime_error);
  EXPECT_THROW(explain_out_of_memory(MemoryUse::kFirstStep, [] { TORCH_CHECK(false, "other"); }),
               c10::Error);
  EXPECT_EQ(explain_out_of_memory(MemoryUse::kFirstStep, [] { return 3; }), 3);
}

}  // namespace
}  // namespace syncbn::train
