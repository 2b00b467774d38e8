"""The checkpoint package's element types as torch's."""

import torch

from checkpoint import DType

TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}
