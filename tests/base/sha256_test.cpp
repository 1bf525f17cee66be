#include <dlfcn.h>
#include <gtest/gtest.h>
#include <syncbn/base/sha256.h>
#include <unistd.h>

namespace syncbn::base {
namespace {

// FIPS 180-4's example, and RFC 4231's test cases 2 and 7.
TEST(Sha256Test, HasThePublishedDigests) {
  EXPECT_EQ(to_hex(sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(to_hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(to_hex(hmac_sha256(std::string(131, '\xaa'),
                               "This is a test using a larger than block-size key and a larger "
                               "than block-size data. The key needs to be hashed before being "
                               "used by the HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

// Ranks seal their leave notice in an exit handler that runs after OpenSSL's.
TEST(Sha256DeathTest, WorksAfterOpenSslHasCleanedUp) {
  const auto proofs_around_cleanup = [] {
    const std::string before = hmac_sha256("key", "text");
    void* library = ::dlopen("libcrypto.so.3", RTLD_LAZY);
    if (library == nullptr) library = ::dlopen("libcrypto.so.1.1", RTLD_LAZY);
    reinterpret_cast<void (*)()>(::dlsym(library, "OPENSSL_cleanup"))();
    ::_exit(hmac_sha256("key", "text") == before ? 0 : 1);
  };
  EXPECT_EXIT(proofs_around_cleanup(), ::testing::ExitedWithCode(0), "");
}

TEST(Sha256Test, ComparesWholeTexts) {
  EXPECT_TRUE(equal_in_constant_time("abc", "abc"));
  EXPECT_FALSE(equal_in_constant_time("abc", "abd"));
  EXPECT_FALSE(equal_in_constant_time("abc", "abcd"));
  EXPECT_TRUE(equal_in_constant_time("", ""));
}

}  // namespace
}  // namespace syncbn::base
