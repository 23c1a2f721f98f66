"""Named accelerators: figures from their datasheets, and assumptions where datasheets give none.

Datasheets give peaks. Compute is often printed with sparsity, links in both directions together; here compute is dense
and every bandwidth is of one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mmjax.configurable import ConfigError, suggest
from mmjax.mesh.gpu import memory_share


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Peaks of a device, and of the nodes that it usually comes in.

    Attributes:
      name: the product's name, such as "H100 80GB SXM".
      flops: dense bfloat16 operations per second.
      memory: bytes.
      bandwidth: bytes per second of its own memory.
      link: bytes per second that a device sends to other devices of its node.
      node: devices of a node.
      network: bytes per second that a device sends to other nodes.
      host: bytes per second that a device copies to its host's memory, or back.
      source: the source of each of these figures.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    node: int
    network: float
    host: float
    source: str

    @property
    def usable(self) -> float:
        """Bytes of the memory that a run may take; see ``gpu.memory_share``."""
        return self.memory * memory_share()


A100 = Accelerator(
    name="A100 80GB SXM",
    flops=312e12,
    memory=80e9,
    bandwidth=2.039e12,
    link=300e9,
    node=8,
    network=25e9,
    host=32e9,
    source="flops, memory, bandwidth, link, host: NVIDIA A100 Tensor Core GPU datasheet (2021), 312 TFLOPS BF16, 80 "
    "GB, 2,039 GB/s, NVLink 600 GB/s and PCIe Gen4 64 GB/s both ways; node, network: NVIDIA DGX A100, 8 "
    "devices, one ConnectX-6 of 200 Gb/s each",
)
A800 = replace(
    A100,
    name="A800 80GB SXM",
    link=200e9,
    source="flops, memory, bandwidth, node, network, host: as the A100, of which it is the export variant; link: "
    "vendors' listings, NVLink 400 GB/s both ways",
)
H100 = Accelerator(
    name="H100 80GB SXM",
    flops=989e12,
    memory=80e9,
    bandwidth=3.35e12,
    link=450e9,
    node=8,
    network=50e9,
    host=64e9,
    source="flops, memory, bandwidth, link, host: NVIDIA H100 Tensor Core GPU datasheet (2023), 1,979 TFLOPS BF16 "
    "with sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s and PCIe Gen5 128 GB/s both ways; node, network: NVIDIA"
    " DGX H100, 8 devices, one ConnectX-7 of 400 Gb/s each",
)
H200 = replace(
    H100,
    name="H200 141GB SXM",
    memory=141e9,
    bandwidth=4.8e12,
    source="flops, memory, bandwidth, link, host: NVIDIA H200 Tensor Core GPU datasheet, 1,979 TFLOPS BF16 with "
    "sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s and PCIe Gen5 128 GB/s both ways; node, network: NVIDIA DGX "
    "H200, 8 devices, one ConnectX-7 of 400 Gb/s each",
)
H800 = replace(
    H100,
    name="H800 80GB SXM",
    link=200e9,
    source="flops, memory, bandwidth, node, network, host: as the H100, of which it is the export variant; link: "
    "vendors' listings, NVLink 400 GB/s both ways",
)
L20 = Accelerator(
    name="L20 48GB PCIe",
    flops=119.5e12,
    memory=48e9,
    bandwidth=864e9,
    link=32e9,
    node=8,
    network=12.5e9,
    host=32e9,
    source="flops, memory, bandwidth, link, host: vendors' listings (NVIDIA publishes no datasheet), 119.5 TFLOPS "
    "BF16, 48 GB, 864 GB/s, PCIe 4.0 x16 without NVLink, 64 GB/s both ways; node, network: assumed, 8 "
    "devices, one card of 200 Gb/s for two",
)
A40 = Accelerator(
    name="A40 48GB PCIe",
    flops=149.7e12,
    memory=48e9,
    bandwidth=696e9,
    link=32e9,
    node=8,
    network=12.5e9,
    host=32e9,
    source="flops, memory, bandwidth, link, host: NVIDIA A40 datasheet, 149.7 TFLOPS BF16, 48 GB, 696 GB/s, PCIe 4.0"
    " x16, 64 GB/s both ways (its NVLink bridges join two devices only and are not counted); node, network: "
    "assumed, 8 devices, one card of 200 Gb/s for two",
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {"a100": A100, "a800": A800, "h100": H100, "h200": H200, "h800": H800, "l20": L20, "a40": A40}
)
"""By the name that users give, in small letters: "h100"."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name in `ACCELERATORS`, in small or capital letters: "h100" or "H100".

    Raises:
      ConfigError: there is none of this name.
    """
    device = ACCELERATORS.get(name.lower())
    if device is None:
        raise ConfigError(f"accelerator={name!r}: there is none of this name; {suggest(name.lower(), ACCELERATORS)}")
    return device
