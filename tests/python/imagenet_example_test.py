"""Runs imagenet/main.py of github.com/pytorch/examples with the one changed line that docs/python.md describes.

The script is not part of this tree: SYNCBN_IMAGENET_EXAMPLE is its path.
"""

import ranks  # first: it skips the tests where there is no torch

import os
import pathlib
import re
import sys
import tempfile
import unittest

LINE = "import torch\n"
WITH_SYNCBN = "import syncbn, torch\n"
ON_CPU = "        print('using CPU, this will be slow')\n"
WITH_DDP = ON_CPU + "        model = torch.nn.parallel.DistributedDataParallel(model)\n"

EXAMPLE = os.environ.get("SYNCBN_IMAGENET_EXAMPLE", "")
if not os.path.isfile(EXAMPLE):
    ranks.report("skipped", "all", "needs: imagenet-example")
    sys.exit(ranks.EXIT_SKIPPED)
try:
    from PIL import Image
    import torchvision  # noqa: F401
except ImportError:
    ranks.report("skipped", "all", "needs: torchvision")
    sys.exit(ranks.EXIT_SKIPPED)


class ImagenetExampleTest(ranks.RanksTest):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # Two steps; in the validation, one image is left over.
        for split, images in (("train", 8), ("val", 5)):
            for i in range(images):
                file = self.folder / split / "ab"[i % 2] / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.effect_noise((40, 40), 20 * (i + 1)).convert("RGB").save(file)

    def example(self, changes):
        """The example with exactly these lines changed."""
        text = pathlib.Path(EXAMPLE).read_text()
        for old, new in changes.items():
            self.assertEqual(("\n" + text).count("\n" + old), 1, f"{EXAMPLE} has another form of {old!r}")
            text = text.replace("\n" + old, "\n" + new)
        changed = self.folder / "main.py"
        changed.write_text(text)
        return changed

    def start(self, command, backend, url, *options):
        # Writes checkpoint.pth.tar to the working folder. SYNCBN_SHARED_MEMORY=1 refuses ranks that do not share memory.
        return ranks.start(["env", "-C", str(self.folder), *command, "--dist-backend", backend, "--dist-url", url,
                            "-a", "shufflenet_v2_x0_5", "--epochs", "1", "-b", "2", "-j", "1", "-p", "1", *options,
                            str(self.folder)],
                           SYNCBN_SHARED_MEMORY="1")

    def evaluated(self, done):
        exit_code, output = done
        self.assertEqual(exit_code, 0, output)
        summaries = re.findall(r"\* +Acc@1 \S+ Acc@5 \S+", output)
        self.assertTrue(summaries, output)
        return summaries

    def test_runs_under_a_launcher(self):
        done = ranks.output_of(self.start([*ranks.LAUNCHERS["syncbn-launch"], "--standalone", "--nproc_per_node=2",
                                           str(self.example({LINE: WITH_SYNCBN}))], "syncbn", "env://"))
        self.assertEqual(len(self.evaluated(done)), 2)

    def test_runs_in_its_own_form_with_two_nodes(self):
        main, url = self.example({LINE: WITH_SYNCBN}), f"tcp://127.0.0.1:{ranks.free_port()}"
        # It spawns its ranks and would also spawn the loader's workers, each of which would take
        # seconds to import torch.
        nodes = [self.start([sys.executable, str(main)], "syncbn", url, "--multiprocessing-distributed",
                            "--world-size", "2", "--rank", str(rank), "-j", "0") for rank in range(2)]
        for node in nodes:
            self.assertEqual(len(self.evaluated(ranks.output_of(node))), 1)

    def test_prints_gloos_losses_where_ddp_trains_on_cpus(self):
        main = self.example({LINE: WITH_SYNCBN, ON_CPU: WITH_DDP})
        printed = {}
        for backend in ("gloo", "syncbn"):
            done = ranks.output_of(self.start([*ranks.LAUNCHERS["syncbn-launch"], "--standalone", "--nproc_per_node=2",
                                               str(main)], backend, "env://", "--seed", "1"))
            self.evaluated(done)
            printed[backend] = sorted(re.sub(r"\t(Time|Data) [^\t]*", "", line) for line in done[1].splitlines()
                                      if "Acc@1" in line)
        self.assertEqual(len(printed["gloo"]), 2 * (2 + 2 + 1))  # steps, batches of the validation, and the summary
        self.assertEqual(printed["syncbn"], printed["gloo"])


if __name__ == "__main__":
    ranks.main(globals())
