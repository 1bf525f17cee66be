#include <syncbn/data/transforms.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/data/image_ops.h>

#include "data/components.h"
#include "data/images.h"
#include "data/jpeg_writer.h"

namespace syncbn::data {
namespace {

using test::picture;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using test::component;
using Component = config::Component<TransformKind>;
using Options = test::ComponentOptions;

Pipeline pipeline(const std::string& type, const Options& options = {}) {
  return Pipeline(std::vector{component(type, options)});
}

/// Labels below 200, which are also the image's first channel.
ImageSample labelled(int64_t width, int64_t height) {
  ImageSample sample{picture(width, height), Image(width, height, 1)};
  for (size_t i = 0; i < sample.mask->pixels.size(); ++i) {
    sample.image.pixels[3 * i] = sample.mask->pixels[i] =
        static_cast<uint8_t>(sample.image.pixels[3 * i] % 200);
  }
  return sample;
}

Image run(const Pipeline& steps, const Image& image, int64_t number, int64_t epoch = 0,
          int64_t seed = 0) {
  SampleRandom random(seed, epoch, number);
  return steps.run(ImageSample{image, std::nullopt}, random).image;
}

ImageSample run_both(const Pipeline& steps, const ImageSample& sample, int64_t number) {
  SampleRandom random(0, 0, number);
  return steps.run(sample, random);
}

TEST(SampleRandomTest, IsAFunctionOfSeedEpochAndSample) {
  const auto first = [](int64_t seed, int64_t epoch, int64_t sample) {
    return SampleRandom(seed, epoch, sample).bits();
  };
  std::set<uint64_t> all;
  for (int64_t seed = -2; seed < 3; ++seed) {
    for (int64_t epoch = 0; epoch < 10; ++epoch) {
      for (int64_t sample = 0; sample < 50; ++sample) {
        EXPECT_EQ(first(seed, epoch, sample), first(seed, epoch, sample));
        all.insert(first(seed, epoch, sample));
      }
    }
  }
  EXPECT_EQ(all.size(), 5U * 10 * 50);
  // If these values change, runs resumed from older checkpoints get other pixels.
  SampleRandom random(1, 2, 3);
  EXPECT_EQ(random.bits(), 1321962074176129191ULL);
  EXPECT_EQ(random.bits(), 15925659190040627001ULL);
}

TEST(SampleRandomTest, DrawsFromTheDocumentedDistributions) {
  constexpr int kDraws = 40'000;
  double uniform = 0, normal = 0, squares = 0, beta = 0, beta_squares = 0, small_beta = 0;
  std::vector<int> counts(7);
  SampleRandom random(5, 0, 0);
  for (int i = 0; i < kDraws; ++i) {
    const double u = random.uniform();
    EXPECT_TRUE(u >= 0 && u < 1);
    uniform += u;
    const double n = random.normal();
    normal += n;
    squares += n * n;
    const double b = random.symmetric_beta(2);
    beta += b;
    beta_squares += (b - 0.5) * (b - 0.5);
    small_beta += std::pow(random.symmetric_beta(0.2) - 0.5, 2);
    ++counts[static_cast<size_t>(random.below(7))];
  }
  EXPECT_NEAR(uniform / kDraws, 0.5, 0.01);
  EXPECT_NEAR(normal / kDraws, 0, 0.03);
  EXPECT_NEAR(squares / kDraws, 1, 0.04);
  EXPECT_NEAR(beta / kDraws, 0.5, 0.01);
  EXPECT_NEAR(beta_squares / kDraws, 1.0 / 20, 0.002);  // 1 / (4 (2 a + 1))
  EXPECT_NEAR(small_beta / kDraws, 1.0 / 5.6, 0.004);
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 7.0, kDraws / 70.0);
}

TEST(PipelineTest, DecodesOnlyTheCropWithTheSameResult) {
  const Pipeline steps(std::vector{component("random_resized_crop", {{"size", "32"}}),
                                   component("random_horizontal_flip"),
                                   component("color_jitter", {{"brightness", "0.4"}})});
  const std::string file = test::write_jpeg(picture(180, 140));
  const Image whole = ImageDecoder(test::bytes_of(file), "a").decode();
  for (int64_t number = 0; number < 60; ++number) {
    ImageDecoder decoder(test::bytes_of(file), "a");
    SampleRandom random(7, 1, number);
    EXPECT_EQ(steps.run(decoder, random), run(steps, whole, number, 1, 7)) << number;
  }
}

TEST(PipelineTest, DependsOnSampleAndEpoch) {
  const Image image = picture(40, 40);
  const Pipeline steps(std::vector{component("random_crop", {{"size", "32"}, {"padding", "4"}}),
                                   component("rand_augment")});
  EXPECT_EQ(run(steps, image, 3), run(steps, image, 3));
  EXPECT_NE(run(steps, image, 3), run(steps, image, 4));
  EXPECT_NE(run(steps, image, 3), run(steps, image, 3, 1));
  EXPECT_NE(run(steps, image, 3), run(steps, image, 3, 0, 1));
}

TEST(PipelineTest, KnowsTheSizeOfItsResults) {
  EXPECT_EQ(Pipeline().size(), std::nullopt);
  EXPECT_EQ(Pipeline().size(ImageSize{5, 6}), (ImageSize{5, 6}));
  const Component shorter = component("resize", {{"size", "256"}});
  EXPECT_EQ(Pipeline(std::vector{shorter}).size(), std::nullopt);
  EXPECT_EQ(Pipeline(std::vector{shorter}).size(ImageSize{500, 375}), (ImageSize{341, 256}));
  const Component middle = component("center_crop", {{"height", "20"}, {"width", "10"}});
  const Component scale = component("random_scale");
  EXPECT_EQ(Pipeline(std::vector{shorter, middle}).size(), (ImageSize{10, 20}));
  EXPECT_EQ(Pipeline(std::vector{middle, scale}).size(), std::nullopt);
}

TEST(PipelineTest, KnowsTheLargestSizeOfItsResults) {
  const auto largest = [](const std::vector<Component>& steps,
                          std::optional<ImageSize> before = {}) {
    return Pipeline(steps).max_size(before);
  };
  const Component bounded = component("resize", {{"size", "8"}, {"max_size", "13"}});
  const Component scale = component("random_scale", {{"max", "1.5"}});
  EXPECT_EQ(largest({}), std::nullopt);
  EXPECT_EQ(largest({}, ImageSize{5, 6}), (ImageSize{5, 6}));
  EXPECT_EQ(largest({component("resize", {{"size", "8"}})}, ImageSize{5, 6}), std::nullopt);
  EXPECT_EQ(largest({bounded, component("random_horizontal_flip")}), (ImageSize{13, 13}));
  EXPECT_EQ(largest({bounded, scale}), (ImageSize{20, 20}));
  EXPECT_EQ(largest({scale}), std::nullopt);
  EXPECT_EQ(largest({scale, component("center_crop", {{"size", "4"}})}), (ImageSize{4, 4}));
}

TEST(PipelineTest, RefusesAMaskOfAnotherSize) {
  EXPECT_THAT(
      [] {
        run_both(Pipeline(), {picture(4, 3), Image(3, 4, 1)}, 0);
      },
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("4 x 3 pixels"), HasSubstr("mask 3 x 4"))));
}

TEST(PipelineTest, RefusesToMakeMorePixelsThanAFileMayHave) {
  // Of these thin images, what is made has many times the pixels.
  const auto made = [](const std::string& type, const Options& options, ImageSize size,
                       int64_t max_pixels = 1'000'000) {
    const Pipeline steps({component(type, options)}, /*has_boxes=*/false, max_pixels);
    return run_both(steps, {Image(size.width, size.height, 3), Image(size.width, size.height, 1)},
                    0);
  };
  const auto refuses = [&](const std::string& type, const Options& options, ImageSize size,
                           const std::string& why) {
    EXPECT_THAT([&] { made(type, options, size); },
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr(fmt::format("{} x {} pixels would make {} pixels", size.width,
                                                size.height, why)),
                          HasSubstr("more than max_pixels, 1000000;"))))
        << type;
  };
  refuses("resize", {{"size", "256"}}, {1, 60'000}, "256 x 15360000");
  refuses("resize", {{"size", "256"}}, {60'000, 1}, "15360000 x 256");
  refuses("resize", {{"height", "2"}, {"width", "2000"}}, {1, 60'000}, "2000 x 60000");
  refuses("random_scale", {{"min", "1e300"}, {"max", "1e300"}}, {1, 60'000},
          "1000000000000 x 1000000000000");
  refuses("random_shortest_size", {{"min_size", "[256,256]"}}, {1, 60'000}, "256 x 15360000");
  refuses("scale_jitter", {{"target_size", "[2000,2000]"}, {"scale_range", "[1,1]"}}, {10, 10},
          "2000 x 2000");
  refuses("random_zoom_out", {{"side_range", "[1e9,1e9]"}, {"p", "1"}}, {1, 60'000},
          "1000000000 x 1000000000000");
  refuses("random_crop", {{"size", "8"}, {"padding", "500"}}, {1, 1}, "1001 x 1001");
  refuses("random_crop", {{"size", "600"}, {"pad_if_needed", "true"}}, {1, 1}, "1199 x 1199");
  refuses("center_crop", {{"size", "1001"}}, {1, 1001}, "1001 x 1001");
  refuses("random_resized_crop", {{"size", "1001"}, {"scale", "[1,1]"}, {"ratio", "[1,1]"}},
          {60, 60}, "1001 x 1001");
  EXPECT_EQ(made("resize", {{"height", "30"}, {"width", "20"}}, {4, 3}, 600).mask->height, 30);
  EXPECT_EQ(made("resize", {{"size", "224"}, {"max_size", "448"}}, {1, 60'000}).image.height, 448);
  EXPECT_EQ(made("center_crop", {{"size", "224"}}, {1, 60'000}).image.width, 224);
}

TEST(TransformTest, OptionsAreChecked) {
  const auto refusal = [](const std::string& type, const Options& options, const char* why) {
    EXPECT_THAT([&] { component(type, options); }, ThrowsMessage<base::UserError>(HasSubstr(why)))
        << type;
  };
  refusal("center_crop", {}, "needs either size, or height and width");
  refusal("center_crop", {{"size", "3"}, {"height", "3"}, {"width", "3"}}, "either size");
  refusal("center_crop", {{"height", "3"}}, "either size");
  refusal("random_crop", {{"size", "0"}}, "at least 1");
  refusal("resize", {{"size", "8"}, {"max_size", "8"}}, "must be above it");
  refusal("resize", {{"height", "8"}, {"width", "8"}, {"max_size", "9"}}, "goes with size");
  refusal("random_resized_crop", {{"size", "8"}, {"scale", "[0.9,0.1]"}}, "in this order");
  refusal("random_resized_crop", {{"size", "8"}, {"ratio", "[2,1]"}}, "ratio has a smallest");
  refusal("color_jitter", {{"hue", "0.6"}}, "at most 0.5");
  refusal("rand_augment", {{"magnitude", "31"}}, "below num_magnitude_bins");
  refusal("random_scale", {{"min", "3"}}, "min must not be above max");
}

TEST(TransformTest, ResizeScalesTheShorterSideAsTorchvisionDoes) {
  const auto size = [](int64_t width, int64_t height) {
    const Image out = run(pipeline("resize", {{"size", "256"}}), picture(width, height), 0);
    return std::pair(out.width, out.height);
  };
  EXPECT_EQ(size(500, 375), std::pair(int64_t{341}, int64_t{256}));
  EXPECT_EQ(size(375, 500), std::pair(int64_t{256}, int64_t{341}));
  EXPECT_EQ(size(20, 20), std::pair(int64_t{256}, int64_t{256}));
}

TEST(TransformTest, ResizeLimitsTheLongerSideAsTorchvisionDoes) {
  const auto size = [](int64_t width, int64_t height) {
    const Image out =
        run(pipeline("resize", {{"size", "80"}, {"max_size", "133"}}), picture(width, height), 0);
    return std::pair(out.width, out.height);
  };
  EXPECT_EQ(size(64, 48), std::pair(int64_t{106}, int64_t{80}));
  EXPECT_EQ(size(100, 50), std::pair(int64_t{133}, int64_t{66}));  // 133 * 80 / 160
  EXPECT_EQ(size(30, 91), std::pair(int64_t{43}, int64_t{133}));   // 133 * 80 / 242 = 43.97
}

TEST(TransformTest, CenterCropRoundsAsPythonDoes) {
  const auto box = [](int64_t width, int64_t height) {
    SampleRandom random(0, 0, 0);
    return component("center_crop", {{"size", "5"}}).make()->region({width, height}, random);
  };
  EXPECT_EQ(box(8, 10), (Box{2, 2, 5, 5}));   // 1.5 and 2.5 round to the even number
  EXPECT_EQ(box(11, 12), (Box{3, 4, 5, 5}));  // 3.5
  EXPECT_EQ(box(3, 9), (Box{0, 2, 3, 5}));
  // Missing pixels become a black border, whose larger part is at the right and at the bottom.
  const Image image = picture(2, 9);
  EXPECT_EQ(run(pipeline("center_crop", {{"size", "5"}}), image, 0),
            pad(crop(image, {0, 2, 2, 5}), 1, 0, 2, 0, 0));
}

TEST(TransformTest, RandomResizedCropKeepsItsAreaAndRatioRanges) {
  const auto transform = component("random_resized_crop", {{"size", "8"}}).make();
  double least = 1, most = 0;
  for (int64_t number = 0; number < 2000; ++number) {
    SampleRandom random(0, 0, number);
    const Box box = transform->region({500, 375}, random);
    const double area = static_cast<double>(box.width * box.height) / (500.0 * 375);
    const double ratio = static_cast<double>(box.width) / static_cast<double>(box.height);
    EXPECT_TRUE(area > 0.078 && area <= 1) << area;
    EXPECT_TRUE(ratio > 0.74 && ratio < 1.35) << ratio;
    EXPECT_TRUE(box.left >= 0 && box.top >= 0);
    EXPECT_TRUE(box.left + box.width <= 500 && box.top + box.height <= 375);
    least = std::min(least, area);
    most = std::max(most, area);
  }
  EXPECT_LT(least, 0.1);
  EXPECT_GT(most, 0.9);
}

TEST(TransformTest, RandomResizedCropFallsBackToTheMiddle) {
  const auto box = [](ImageSize size) {
    SampleRandom random(0, 0, 0);
    return component("random_resized_crop", {{"size", "8"}, {"scale", "[1,1]"}})
        .make()
        ->region(size, random);
  };
  EXPECT_EQ(box({1000, 30}), (Box{480, 0, 40, 30}));
  EXPECT_EQ(box({30, 1000}), (Box{0, 480, 30, 40}));
  EXPECT_EQ(box({1, 1}), (Box{0, 0, 1, 1}));
}

TEST(TransformTest, RandomCropPadsImageAndMask) {
  const ImageSample sample = labelled(10, 8);
  const Pipeline steps =
      pipeline("random_crop", {{"height", "8"}, {"width", "10"}, {"padding", "3"}, {"fill", "7"}});
  const Image padded = pad(sample.image, 3, 3, 3, 3, 7);
  const Image padded_mask = pad(*sample.mask, 3, 3, 3, 3, 255);
  std::set<std::pair<int64_t, int64_t>> places;
  for (int64_t number = 0; number < 400; ++number) {
    const ImageSample out = run_both(steps, sample, number);
    for (int64_t top = 0; top <= 6; ++top) {
      for (int64_t left = 0; left <= 6; ++left) {
        if (crop(padded, {left, top, 10, 8}) != out.image) continue;
        EXPECT_EQ(crop(padded_mask, {left, top, 10, 8}), *out.mask);
        places.insert({left, top});
      }
    }
  }
  EXPECT_EQ(places.size(), 49U);
}

TEST(TransformTest, RandomCropRefusesSmallImagesUnlessPadIfNeeded) {
  const Image image = picture(6, 9);
  EXPECT_THAT(
      [&] {
        run(pipeline("random_crop", {{"size", "8"}}), image, 0);
      },
      ThrowsMessage<base::UserError>(
          AllOf(HasSubstr("8 x 8"), HasSubstr("6 x 9"), HasSubstr("pad_if_needed"))));
  const Image out =
      run(pipeline("random_crop", {{"size", "8"}, {"pad_if_needed", "true"}}), image, 0);
  EXPECT_EQ(out.width, 8);
  EXPECT_EQ(out.height, 8);
}

TEST(TransformTest, FlipsMirrorImageAndMask) {
  const ImageSample sample = labelled(7, 5);
  ImageSample mirrored = sample;
  flip_horizontally(mirrored.image);
  flip_horizontally(*mirrored.mask);
  int flips = 0;
  for (int64_t number = 0; number < 400; ++number) {
    const ImageSample out = run_both(pipeline("random_horizontal_flip"), sample, number);
    const bool flipped = out.image == mirrored.image;
    EXPECT_EQ(*out.mask, flipped ? *mirrored.mask : *sample.mask);
    flips += flipped ? 1 : 0;
  }
  EXPECT_NEAR(flips, 200, 50);
  Image upside_down = sample.image;
  flip_vertically(upside_down);
  EXPECT_EQ(run(pipeline("random_vertical_flip", {{"p", "1"}}), sample.image, 0), upside_down);
}

TEST(TransformTest, RandomScaleResizesImageAndMask) {
  const ImageSample sample = labelled(20, 10);
  for (int64_t number = 0; number < 50; ++number) {
    const ImageSample out = run_both(pipeline("random_scale"), sample, number);
    EXPECT_TRUE(out.image.width >= 10 && out.image.width <= 40);
    EXPECT_NEAR(static_cast<double>(out.image.height), static_cast<double>(out.image.width) / 2, 1);
    EXPECT_EQ(*out.mask, resize_nearest(*sample.mask, out.image.width, out.image.height));
  }
}

TEST(TransformTest, RandomErasingErasesARectangle) {
  const Image image(30, 20, 3);
  const Pipeline steps = pipeline("random_erasing", {{"p", "1"}, {"value", "9"}});
  for (int64_t number = 0; number < 200; ++number) {
    const Image out = run(steps, image, number);
    const auto erased = std::ranges::count(out.pixels, 9) / 3;
    int64_t left = 30, right = -1, top = 20, bottom = -1;
    for (int64_t y = 0; y < 20; ++y) {
      for (int64_t x = 0; x < 30; ++x) {
        if (out.row(y)[3 * x] == 0) continue;
        left = std::min(left, x), right = std::max(right, x);
        top = std::min(top, y), bottom = std::max(bottom, y);
      }
    }
    EXPECT_EQ(erased, (right - left + 1) * (bottom - top + 1));
    EXPECT_TRUE(erased > 0.01 * 600 && erased < 0.36 * 600) << erased;
  }
}

TEST(TransformTest, ColorJitterAppliesItsOptions) {
  const Image image = picture(16, 16);
  EXPECT_EQ(run(pipeline("color_jitter"), image, 0), image);
  Image black = image;
  adjust_brightness(black, 0);
  // The smallest factor is max(1 - 3, 0) = 0.
  double darkest = 255;
  for (int64_t number = 0; number < 200; ++number) {
    const Image out = run(pipeline("color_jitter", {{"brightness", "3"}}), image, number);
    darkest = std::min<double>(darkest, *std::ranges::max_element(out.pixels));
  }
  EXPECT_LT(darkest, 40);
  const Image turned = run(pipeline("color_jitter", {{"hue", "0.5"}}), image, 1);
  EXPECT_NE(turned, image);
  for (size_t i = 0; i < image.pixels.size(); i += 3) {
    const auto most = [i](const Image& of) {
      return std::max({of.pixels[i], of.pixels[i + 1], of.pixels[i + 2]});
    };
    EXPECT_EQ(most(turned), most(image));  // the value of HSV
  }
}

/// All possible results of one operation of RandAugment at magnitude 9 of 31.
std::vector<Image> at_magnitude_9(const Image& image) {
  std::vector<Image> all = {image};
  const auto change = [&](const auto& operation) {
    Image changed = image;
    operation(changed);
    all.push_back(changed);
  };
  for (const int sign : {1, -1}) {
    const double shift = std::trunc(sign * 0.3 * 150.0 / 331.0 * 40);
    all.push_back(affine(image, {1, sign * 0.09, 0, 0, 1, 0}, 0));
    all.push_back(affine(image, {1, 0, 0, sign * 0.09, 1, 0}, 0));
    all.push_back(affine(image, {1, 0, -shift, 0, 1, 0}, 0));
    all.push_back(affine(image, {1, 0, 0, 0, 1, -shift}, 0));
    all.push_back(rotate(image, sign * 9.0, 0));
    change([&](Image& i) { adjust_brightness(i, 1 + sign * 0.27); });
    change([&](Image& i) { adjust_saturation(i, 1 + sign * 0.27); });
    change([&](Image& i) { adjust_contrast(i, 1 + sign * 0.27); });
    change([&](Image& i) { adjust_sharpness(i, 1 + sign * 0.27); });
  }
  change([](Image& i) { posterize(i, 7); });
  change([](Image& i) { solarize(i, 178.5); });
  change([](Image& i) { autocontrast(i); });
  change([](Image& i) { equalize(i); });
  return all;
}

TEST(TransformTest, RandAugmentAppliesTorchvisionsOperations) {
  const Image image = picture(40, 40);
  const std::vector<Image> expected = at_magnitude_9(image);
  std::set<size_t> seen;
  for (int64_t number = 0; number < 600; ++number) {
    const Image out = run(pipeline("rand_augment", {{"num_ops", "1"}}), image, number);
    const auto found = std::ranges::find(expected, out);
    ASSERT_NE(found, expected.end()) << number;
    seen.insert(static_cast<size_t>(found - expected.begin()));
  }
  EXPECT_EQ(seen.size(), expected.size());
}

TEST(TransformTest, AutoAugmentTransformsTheMaskWithTheImage) {
  const ImageSample sample = labelled(40, 40);
  int moved = 0;
  for (int64_t number = 0; number < 300; ++number) {
    const ImageSample out = run_both(pipeline("trivial_augment_wide"), sample, number);
    if (*out.mask == *sample.mask) continue;
    ++moved;
    for (size_t i = 0; i < out.mask->pixels.size(); ++i) {
      const int label = out.mask->pixels[i];
      EXPECT_EQ(out.image.pixels[3 * i], label == 255 ? 0 : label);
    }
  }
  EXPECT_GT(moved, 60);
}

}  // namespace
}  // namespace syncbn::data
