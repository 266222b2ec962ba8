"""The machines of several cases: cases with equal machines share a guest, and each further machine costs a boot."""

from harness.machine import Machine, Nvme

# The last controller of the first two can be unplugged; the case that does it plugs it in again, with its medium.
IOMMU = Machine(
    nvme=(Nvme(options="max_ioqpairs=4"), Nvme(block_size=4096), Nvme(mib=16, port="port0")), iommu=True, hugepages=16
)
PLAIN = Machine(nvme=(Nvme(), Nvme(mib=16, port="port0")), hugepages=16)
# With kernel 6.12.
IOMMUFD = Machine(nvme=(Nvme(), Nvme()), iommu=True, hugepages=16, vfio=True)
# With the newest kernel.
NEWEST = Machine(nvme=(Nvme(),), newest=True)
NO_IOMMU = Machine(nvme=(Nvme(),), hugepages=16, vfio=True)
# With tlshd, keyctl and an nvme-cli for TLS.
TLS = Machine(tls=True)
# The same with the newest kernel, whose host has secure channel concatenation.
NEWEST_TLS = Machine(tls=True, newest=True)
