#include <syncbn/data/dataset.h>

#include <syncbn/data/digits.h>
#include <syncbn/data/image_sets.h>
#include <syncbn/data/synthetic.h>

namespace syncbn::data {

std::string to_string(Split split) {
  return split == Split::kTrain ? "train" : "test";
}

Normalization Dataset::normalization() const {
  const auto shape = sample_shape();
  const auto channels = static_cast<size_t>(shape.empty() ? 1 : shape.front());
  return {std::vector<double>(channels, 0.0), std::vector<double>(channels, 1.0)};
}

DatasetKind::Registry& DatasetKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<DigitsOptions>("digits", "UCI's handwritten digits, 1 x 8 x 8, ten classes",
                            load_digits);
    made.add<SyntheticOptions>("synthetic", "random images with a learnable class signal",
                               make_synthetic);
    made.add<MnistOptions>("mnist", "MNIST's or Fashion-MNIST's idx files", load_mnist);
    made.add<CifarOptions>("cifar10", "CIFAR-10's binary files", load_cifar10);
    made.add<CifarOptions>("cifar100", "CIFAR-100's binary files, the fine labels", load_cifar100);
    made.add<CsvImagesOptions>("csv_images", "a grey image and its label a line", load_csv_images);
    made.add<ImageFolderOptions>("image_folder", "JPEG and PNG files, a folder per class",
                                 load_image_folder);
    made.add<SegmentationFolderOptions>("segmentation_folder", "images and masks of the same name",
                                        load_segmentation_folder);
    made.add<TarShardsOptions>("tar_shards", "tar files as webdataset writes them",
                               load_tar_shards);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::data
