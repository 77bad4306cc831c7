"""All-reduces of tensor-parallel groups in PyTorch and vLLM: a ring, a hierarchical ring or a switch for each call.

`torch_groups` and `backend` import torch, `plugin` and `vllm` vLLM. The rest runs and is tested without them.
"""

VARIABLE = "KVROUTE_ALL_REDUCE"
"""Environment variable with the path of the settings; without it nothing changes."""
