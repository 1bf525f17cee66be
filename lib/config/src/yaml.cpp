#include <syncbn/config/yaml.h>
