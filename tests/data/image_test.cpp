#include <syncbn/data/image.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include "data/images.h"
#include "data/jpeg_writer.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

using test::bytes_of;
using test::hash_of;
using test::JpegStyle;
using test::kImages;
using test::picture;
using test::write_jpeg;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Colors = JpegStyle::Colors;

Image decode(const std::string& file, const DecodeOptions& options = {}) {
  return ImageDecoder(bytes_of(file), "a.jpg", options).decode();
}

/// "name width height hash width height hash" of each image, as decoded by Pillow.
struct Golden {
  std::string name;
  std::string stored;
  std::string turned;
};

std::vector<Golden> golden() {
  std::ifstream lines(kImages / "images.txt");
  std::vector<Golden> all;
  std::string name, w, h, hash, turned_w, turned_h, turned_hash;
  while (lines >> name >> w >> h >> hash >> turned_w >> turned_h >> turned_hash) {
    all.push_back({name, fmt::format("{} {} {}", w, h, hash),
                   fmt::format("{} {} {}", turned_w, turned_h, turned_hash)});
  }
  return all;
}

Image cropped(const Image& image, const Box& box) {
  Image part(box.width, box.height, image.channels);
  for (int64_t y = 0; y < box.height; ++y) {
    std::copy_n(image.row(box.top + y) + box.left * image.channels, part.row_bytes(), part.row(y));
  }
  return part;
}

/// Boxes of all sizes, some of them at the image's edges.
std::vector<Box> boxes(int64_t width, int64_t height, int count) {
  uint32_t state = 7;
  const auto below = [&state](int64_t bound) {
    state = state * 1664525 + 1013904223;
    return static_cast<int64_t>(state >> 8) % bound;
  };
  std::vector<Box> all = {{0, 0, 1, 1}, {width - 1, height - 1, 1, 1}, {0, height - 1, width, 1}};
  while (std::ssize(all) < count) {
    Box box{below(width), below(height)};
    box.width = 1 + below(width - box.left);
    box.height = 1 + below(height - box.top);
    all.push_back(box);
  }
  return all;
}

/// All kinds of JPEGs.
std::map<std::string, JpegStyle> styles() {
  std::map<std::string, JpegStyle> all;
  for (const bool progressive : {false, true}) {
    const std::string tail = progressive ? "_progressive" : "";
    for (const auto& [h, v] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4}, {4, 2}}) {
      all[fmt::format("ycc_{}x{}{}", h, v, tail)] = {
          .horizontal = h, .vertical = v, .progressive = progressive};
    }
    all["rgb" + tail] = {
        .colors = Colors::kRgb, .horizontal = 1, .vertical = 1, .progressive = progressive};
    all["grey" + tail] = {.colors = Colors::kGrey, .progressive = progressive};
    all["cmyk" + tail] = {
        .colors = Colors::kCmyk, .horizontal = 1, .vertical = 1, .progressive = progressive};
    all["ycck" + tail] = {.colors = Colors::kYcck, .progressive = progressive};
  }
  all["restart"] = {.restart_interval = 3};
  all["arithmetic"] = {.arithmetic = true};
  all["one_scan_each"] = {.one_scan_each = true};
  return all;
}

int64_t channels_of(const JpegStyle& style) {
  if (style.colors == Colors::kGrey) return 1;
  return style.colors == Colors::kCmyk || style.colors == Colors::kYcck ? 4 : 3;
}

TEST(ImageTest, FilesDecodeAsInPillow) {
  const auto all = golden();
  ASSERT_EQ(all.size(), 61U);
  for (const Golden& file : all) {
    // Pillow clamps grey values, and scales colours.
    DecodeOptions options{.clamp_high_bits = file.name.starts_with("png_grey16")};
    EXPECT_EQ(hash_of(load_image(kImages / file.name, options)), file.stored) << file.name;
    options.exif_orientation = true;
    EXPECT_EQ(hash_of(load_image(kImages / file.name, options)), file.turned) << file.name;
  }
}

TEST(ImageTest, ValuesOfSixteenBitsKeepTheirUpperBitsOrAreClamped) {
  for (const char* name : {"png_grey16.png", "png_grey16_interlaced.png", "png_grey_alpha16.png",
                           "png_rgb16.png", "png_rgba16_interlaced.png"}) {
    const Image scaled = load_image(kImages / name);
    const Image clamped = load_image(kImages / name, {.clamp_high_bits = true});
    int64_t bright = 0;
    for (size_t i = 0; i < scaled.pixels.size(); ++i) {
      // Values below 256 have no upper bits, all others are clamped.
      EXPECT_EQ(scaled.pixels[i] > 0 ? clamped.pixels[i] : 255, 255);
      EXPECT_EQ(clamped.pixels[i] < 255 ? scaled.pixels[i] : 0, 0);
      bright += scaled.pixels[i] > 100 ? 1 : 0;
    }
    EXPECT_GT(bright, 30) << name;
    EXPECT_LT(bright, std::ssize(scaled.pixels)) << name;
  }
  const auto has_high_bits = [](const char* name) {
    const std::string file = base::read_file(kImages / name);
    return ImageDecoder(bytes_of(file), name).has_high_bits();
  };
  for (const char* name : {"png_grey16.png", "png_grey_alpha16.png", "png_rgb16.png"}) {
    EXPECT_TRUE(has_high_bits(name)) << name;
  }
  for (const char* name : {"png_rgb8.png", "png_grey4.png", "jpeg_grey.jpg"}) {
    EXPECT_FALSE(has_high_bits(name)) << name;
  }
}

TEST(ImageTest, TellsTheOrientationWhetherOrNotItIsApplied) {
  for (const auto& [name, orientation] : {std::pair("exif_3.jpg", 3),
                                          {"exif_6.jpg", 6},
                                          {"exif_6_late.png", 6},
                                          {"png_rgb8.png", 1}}) {
    const std::string file = base::read_file(kImages / name);
    for (const bool turns : {false, true}) {
      EXPECT_EQ(ImageDecoder(bytes_of(file), name, {.exif_orientation = turns}).file_orientation(),
                orientation)
          << name;
    }
  }
}

TEST(ImageTest, APngWithDamagedMetadataKeepsItsStoredOrientation) {
  // Damages the first data byte of the chunk with the orientation.
  for (const char* name : {"exif_6.png", "exif_6_late.png"}) {
    std::string file = base::read_file(kImages / name);
    EXPECT_EQ(ImageDecoder(bytes_of(file), name, {.exif_orientation = true}).width(), 5) << name;
    file[file.find("eXIf") + 4] ^= 1;
    EXPECT_EQ(ImageDecoder(bytes_of(file), name, {.exif_orientation = true}).width(), 7) << name;
  }
}

constexpr const char* kPillowScript = R"(
import pathlib, sys
from PIL import Image
for path in pathlib.Path(sys.argv[1]).glob("*.jpg"):
    path.with_suffix(".rgb").write_bytes(Image.open(path).convert("RGB").tobytes())
)";

TEST(ImageTest, EveryKindOfJpegDecodesAsInPillow) {
  SYNCBN_SKIP_UNLESS(test::python_has("PIL.Image"), "python-pillow");
  const test::TempFolder folder;
  for (const auto& [name, style] : styles()) {
    for (const int64_t size : {1, 7, 16, 33}) {
      folder.write(fmt::format("{}_{}.jpg", name, size),
                   write_jpeg(picture(size, 2 * size + 1, channels_of(style)), style));
    }
  }
  const auto result =
      test::run_program({test::python(), "-c", kPillowScript, folder.path().string()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  int compared = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path().extension() != ".jpg") continue;
    const std::string pillow =
        base::read_file(std::filesystem::path(entry).replace_extension(".rgb"));
    const Image ours = load_image(entry.path());
    EXPECT_TRUE(std::ranges::equal(ours.pixels, bytes_of(pillow))) << entry.path();
    ++compared;
  }
  EXPECT_EQ(compared, std::ssize(styles()) * 4);
}

TEST(ImageTest, ARegionEqualsACropOfTheWholeImage) {
  for (const auto& [name, style] : styles()) {
    const std::string file = write_jpeg(picture(181, 163, channels_of(style)), style);
    const Image whole = decode(file);
    for (const Box& box : boxes(181, 163, 40)) {
      EXPECT_EQ(ImageDecoder(bytes_of(file), name).decode(box), cropped(whole, box))
          << name << ": " << box.width << " x " << box.height << " at " << box.left << ", "
          << box.top;
    }
  }
}

TEST(ImageTest, ARegionOfAnOrientedOrInterlacedImageEqualsACrop) {
  for (const Golden& file : golden()) {
    const std::string bytes = base::read_file(kImages / file.name);
    const DecodeOptions options{.exif_orientation = true};
    const Image whole = ImageDecoder(bytes_of(bytes), file.name, options).decode();
    for (const Box& box : boxes(whole.width, whole.height, 12)) {
      EXPECT_EQ(ImageDecoder(bytes_of(bytes), file.name, options).decode(box), cropped(whole, box))
          << file.name;
    }
  }
}

TEST(ImageTest, ADecoderCanDecodeAgain) {
  for (const char* name : {"jpeg_420.jpg", "png_rgb8.png"}) {
    const std::string file = base::read_file(kImages / name);
    ImageDecoder decoder(bytes_of(file), name);
    const Image first = decoder.decode();
    EXPECT_EQ(decoder.decode({3, 2, 5, 4}), cropped(first, {3, 2, 5, 4}));
    EXPECT_EQ(decoder.decode(), first);
  }
}

TEST(ImageTest, ASecondFrameHeaderDoesNotChangeTheSize) {
  // Found by image_fuzz: a progressive file in which a larger frame header follows a later scan.
  std::string file = write_jpeg(picture(16, 16), {.progressive = true});
  const size_t frame = file.find("\xff\xc2");
  std::string larger = file.substr(frame, 19);
  larger.replace(5, 4, "\xf0\xf0\xf0\xf0");
  file.insert(file.rfind("\xff\xda"), larger);
  ImageDecoder decoder(bytes_of(file), "a.jpg");
  EXPECT_THROW(decoder.decode(), base::UserError);
  EXPECT_EQ(decoder.width(), 16);
  EXPECT_EQ(decoder.height(), 16);
}

/// The peak size of this process's mapped memory, in bytes.
int64_t most_mapped() {
  std::ifstream lines("/proc/self/status");
  for (std::string word; lines >> word;) {
    int64_t kilobytes = 0;
    if (word == "VmPeak:" && lines >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

TEST(ImageTest, AChunkWithAFalseLengthAllocatesNoMemory) {
  // Found by image_fuzz: a chunk of EXIF data with a stated length of 2 GB.
  const std::string file =
      base::read_file(SYNCBN_SOURCE_DIR "/tests/fuzz/corpus/image/png_exif_of_2_gb");
  const int64_t before = most_mapped();
  EXPECT_GT(before, 0);
  EXPECT_THROW(decode(file, {.exif_orientation = true}), base::UserError);
  EXPECT_LT(most_mapped() - before, 1 << 30);
}

TEST(ImageTest, RefusesARegionOutsideTheImage) {
  const std::string file = write_jpeg(picture(8, 6));
  for (const Box box : {Box{0, 0, 9, 1}, {0, 0, 1, 7}, {-1, 0, 2, 2}, {8, 0, 1, 1}, {0, 0, 0, 1}}) {
    EXPECT_THROW(ImageDecoder(bytes_of(file), "a").decode(box), base::InternalError);
  }
}

TEST(ImageTest, MasksAreIndicesOrStoredValues) {
  const auto mask = [](const char* name) {
    const std::string file = base::read_file(kImages / name);
    return ImageDecoder(bytes_of(file), name).decode_mask();
  };
  const auto largest = [](const Image& image) { return *std::ranges::max_element(image.pixels); };
  const Image two_bits = mask("png_grey2.png");
  EXPECT_EQ(two_bits.channels, 1);
  EXPECT_EQ(largest(two_bits), 3);
  EXPECT_EQ(largest(mask("png_grey1.png")), 1);
  // The same pixels as colours: 0, 85, 170, 255.
  const Image seen = load_image(kImages / "png_grey2.png");
  for (size_t i = 0; i < two_bits.pixels.size(); ++i) {
    EXPECT_EQ(two_bits.pixels[i] * 85, seen.pixels[3 * i]);
  }
  EXPECT_LE(largest(mask("png_palette_transparent.png")), 1);
}

TEST(ImageTest, GreyMasksOfFewBitsAreScaledOnRequest) {
  for (const char* name : {"png_grey1.png", "png_grey2.png", "png_grey4_interlaced.png",
                           "png_grey8.png", "png_palette1.png", "png_palette8.png"}) {
    const std::string file = base::read_file(kImages / name);
    const Image stored = ImageDecoder(bytes_of(file), name).decode_mask();
    const Image scaled = ImageDecoder(bytes_of(file), name, {.scale_labels = true}).decode_mask();
    const Image seen = load_image(kImages / name);
    const bool is_grey = std::string_view(name).starts_with("png_grey");
    for (size_t i = 0; i < stored.pixels.size(); ++i) {
      ASSERT_EQ(scaled.pixels[i], is_grey ? seen.pixels[3 * i] : stored.pixels[i]) << name;
    }
  }
}

TEST(ImageTest, RefusesMasksWithoutLabels) {
  const auto refusal = [](const char* name, const char* why) {
    const std::string file = base::read_file(kImages / name);
    EXPECT_THAT([&] { ImageDecoder(bytes_of(file), name).decode_mask(); },
                ThrowsMessage<base::UserError>(AllOf(HasSubstr(name), HasSubstr(why))));
  };
  refusal("jpeg_grey.jpg", "masks must be PNG");
  refusal("png_rgb8.png", "a grey or palette PNG: if its channels are equal, save one of them");
  refusal("png_grey16.png", "it has labels above 255, up to 65441: save it with 8 bits");
}

TEST(ImageTest, NamesAFileThatIsNeitherJpegNorPng) {
  EXPECT_THAT([] { decode("GIF89a"); }, ThrowsMessage<base::UserError>(AllOf(
                                            HasSubstr("a.jpg"), HasSubstr("neither JPEG nor PNG"),
                                            HasSubstr("47 49 46 38"))));
  EXPECT_THAT([] { decode(""); }, ThrowsMessage<base::UserError>(HasSubstr("it is empty")));
  EXPECT_THAT([] { decode("<html>404</html>"); },
              ThrowsMessage<base::UserError>(HasSubstr("'a.jpg': it is HTML")));
  EXPECT_THAT([] { load_image("/nowhere/x.png"); },
              ThrowsMessage<base::UserError>(HasSubstr("/nowhere/x.png")));
}

TEST(ImageTest, RefusesMorePixelsThanAllowedBeforeDecodingThem) {
  const std::string jpeg = write_jpeg(picture(40, 30));
  EXPECT_EQ(decode(jpeg, {.max_pixels = 1200}).width, 40);
  EXPECT_THAT(([&] { ImageDecoder(bytes_of(jpeg), "a.jpg", {.max_pixels = 1199}); }),
              ThrowsMessage<base::UserError>(AllOf(HasSubstr("a.jpg"), HasSubstr("40 x 30 pixels"),
                                                   HasSubstr("max_pixels, 1199"))));
  // Only a header: 60000 x 60000 pixels would take 10.8 GB.
  std::string png = base::read_file(kImages / "png_rgb8.png");
  png.replace(16, 8, std::string("\0\0\xea\x60\0\0\xea\x60", 8));
  png.replace(29, 4, std::string("\x0f\xb0\xe2\x15", 4));
  EXPECT_THAT([&] { ImageDecoder(bytes_of(png), "b.png"); },
              ThrowsMessage<base::UserError>(HasSubstr("60000 x 60000")));
}

TEST(ImageTest, RefusesMoreScansThanAllowed) {
  // libjpeg-turbo's default progression has ten scans.
  const std::string file = write_jpeg(picture(16, 16), {.progressive = true});
  EXPECT_EQ(decode(file, {.max_scans = 10}).width, 16);
  EXPECT_THAT(([&] { decode(file, {.max_scans = 9}); }),
              ThrowsMessage<base::UserError>(HasSubstr("more than max_scans, 9")));
}

/// The length of a PNG up to the end of its pixels. The chunks after them may be missing.
size_t size_until_pixels_end(const std::string& file) {
  const size_t pixels = file.find("IDAT");
  if (pixels == std::string::npos) return file.size();
  const size_t low = static_cast<uint8_t>(file[pixels - 1]);
  const size_t high = static_cast<uint8_t>(file[pixels - 2]);
  return pixels + 4 + low + 256 * high;
}

TEST(ImageTest, ReportsTruncatedFiles) {
  for (const Golden& file : golden()) {
    const std::string whole = base::read_file(kImages / file.name);
    const size_t end = size_until_pixels_end(whole);
    for (const size_t length : {end / 4, end / 2, end - 20}) {
      const std::string part = whole.substr(0, length);
      EXPECT_THAT(
          [&] { ImageDecoder(bytes_of(part), file.name).decode(); },
          ThrowsMessage<base::UserError>(AllOf(HasSubstr(file.name), HasSubstr("cut short"))))
          << length << " of " << whole.size();
    }
  }
}

TEST(ImageTest, DamagedBytesGiveAnImageOrAnErrorThatNamesTheFile) {
  int errors = 0;
  for (const Golden& file : golden()) {
    const std::string whole = base::read_file(kImages / file.name);
    for (size_t at = 0; at < whole.size(); at += 7) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
      try {
        ImageDecoder decoder(bytes_of(damaged), file.name,
                             {.exif_orientation = true, .max_pixels = 100'000});
        const Image image = decoder.decode();
        EXPECT_EQ(std::ssize(image.pixels), 3 * image.width * image.height);
      } catch (const base::UserError& error) {
        EXPECT_THAT(error.what(), HasSubstr(file.name));
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 100);
}

TEST(EncodeJpegTest, DecodesToAboutTheSamePixels) {
  for (const int64_t channels : {1, 3}) {
    Image image(40, 30, channels);
    for (size_t i = 0; i < image.pixels.size(); ++i) {
      image.pixels[i] = static_cast<uint8_t>(i / static_cast<size_t>(40 * channels) * 8);
    }
    const Image decoded = decode(encode_jpeg(image, 95));
    ASSERT_EQ(decoded.width, 40);
    ASSERT_EQ(decoded.height, 30);
    for (int64_t y = 0; y < 30; ++y) EXPECT_NEAR(decoded.row(y)[30], y * 8, 4) << y;
  }
}

}  // namespace
}  // namespace syncbn::data
