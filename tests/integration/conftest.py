"""Stages of these tests share one process: more than one torch thread each only makes them wait."""

import torch

torch.set_num_threads(1)
