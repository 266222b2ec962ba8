"""The cases in execution order; importing a module registers its cases."""

from . import selftest, connect, admin, data, namespaces, access, authentication, parameters, tls, rdma, recovery, pci, driver, commands, removal, bdev_nvme, instructions, vfio_user, lab, initiator, concatenation, copies, reservations, nbd, ublk, vhost_user, iscsi, store, lvol, zero_copy  # noqa: F401, I001
