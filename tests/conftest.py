import os

import hypothesis
import torch

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX is a reference here; it must not look for an accelerator
hypothesis.settings.register_profile("tilewright", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tilewright")
torch.set_num_threads(2)
