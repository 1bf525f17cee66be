// Headers of exchanges on GPUs. They are exchanged between CPUs, so no GPU is needed here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/full.h>

#include "monitor/in_flight_headers.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
using dist::detail::InFlightHeaders;
using syncbn::base::UnavailableError;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Tensors = std::vector<at::Tensor>;

/// The header of exchange n contains 10 n + rank.
Tensors send(InFlightHeaders& headers, size_t n, dist::Timeout timeout = std::nullopt) {
  const double value = 10.0 * static_cast<double>(n) + dist::rank();
  return headers.send(at::full({1, 3}, value, at::kDouble), dist::default_group(), timeout,
                      "layer 'norm'");
}

void append(Tensors& to, const Tensors& more) {
  to.insert(to.end(), more.begin(), more.end());
}

void expect_in_order(const Tensors& come) {
  for (size_t n = 0; n < come.size(); ++n) {
    for (int64_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(come[n][rank][0].item<double>(), 10.0 * static_cast<double>(n) + rank);
    }
  }
}

class InFlightHeadersTest : public ::testing::TestWithParam<bool> {};

TEST_P(InFlightHeadersTest, SendDoesNotWaitAndKeepsTheOrder) {
  run_ranks(2, [](int rank) {
    dist::init_process_group({.shared_memory = GetParam()});
    constexpr size_t kFirst = InFlightHeaders::kBatch + 5;
    InFlightHeaders headers;
    Tensors come;
    size_t sent = 0;
    const auto tell = dist::new_group({0, 1});
    if (rank == 1) dist::barrier(tell);
    for (; sent < kFirst; ++sent) {
      append(come, send(headers, sent));
      EXPECT_TRUE(rank == 1 || come.empty()) << "rank 1 has not sent any";
    }
    if (rank == 0) dist::barrier(tell);
    // Headers arrive although no thread waits for them.
    for (; sent < 2 * InFlightHeaders::kBatch - 1; ++sent) {
      std::this_thread::sleep_for(std::chrono::milliseconds(come.empty() ? 1000 : 0));
      append(come, send(headers, sent));
    }
    EXPECT_EQ(come.size(), InFlightHeaders::kBatch);
    expect_in_order(come);
    dist::barrier(tell);
  });
}

TEST_P(InFlightHeadersTest, ABatchIsWaitedForAheadOfTheNext) {
  run_ranks(2, [](int rank) {
    dist::init_process_group({.shared_memory = GetParam()});
    InFlightHeaders headers;
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    Tensors come;
    for (size_t sent = 0; sent < 2 * InFlightHeaders::kBatch; ++sent)
      append(come, send(headers, sent));
    EXPECT_GE(come.size(), InFlightHeaders::kBatch);
    expect_in_order(come);
    dist::barrier(dist::new_group({0, 1}));
  });
}

TEST_P(InFlightHeadersTest, ABatchOfOneComesAtOnce) {
  run_ranks(2, [](int) {
    dist::init_process_group({.shared_memory = GetParam()});
    InFlightHeaders headers(/*batch=*/1);
    Tensors come;
    for (size_t sent = 0; sent < 5; ++sent) {
      append(come, send(headers, sent));
      EXPECT_EQ(come.size(), sent + 1);
    }
    expect_in_order(come);
  });
}

TEST_P(InFlightHeadersTest, ARankThatDoesNotSendIsNamed) {
  run_ranks(2, [](int rank) {
    dist::init_process_group({.shared_memory = GetParam()});
    const auto until_then = dist::new_group({0, 1});
    if (rank == 1) return dist::barrier(until_then);
    InFlightHeaders headers;
    std::string message;
    // The second batch at the latest waits for the first one, and times out.
    for (size_t sent = 0; message.empty() && sent < 2 * InFlightHeaders::kBatch; ++sent) {
      try {
        send(headers, sent, std::chrono::milliseconds(500));
      } catch (const UnavailableError& error) {
        message = error.what();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_THAT(message, AllOf(HasSubstr("layer 'norm'"), HasSubstr("500ms"), HasSubstr("rank 1")));
    dist::barrier(until_then);
  });
}

INSTANTIATE_TEST_SUITE_P(, InFlightHeadersTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "SharedMemory" : "Gloo"; });

}  // namespace
