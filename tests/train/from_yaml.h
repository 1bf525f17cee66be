#pragma once

#include "support/from_yaml.h"

namespace syncbn::train {
using test::from_yaml;
}
