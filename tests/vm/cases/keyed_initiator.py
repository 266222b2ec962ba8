"""Our initiator in the guest, which has keys and attaches the kernel's target."""


class KeyedInitiator:
    """`ringbolt serve` with the texts `keys` in its keyring, by their names."""

    def __init__(self, guest, target, subsystem, host, keys):
        self.guest = guest
        address = f"trtype=TCP traddr=127.0.0.1 adrfam=ipv4 trsvcid={target.port}"
        self.path = f"{address} name=n subnqn={subsystem.nqn} hostnqn={host}"
        guest.check("(umask 077; mkdir -p /tmp/keys)")
        for name, text in keys.items():
            guest.check(f"(umask 077; echo '{text}' > /tmp/keys/{name})")
        self.job = guest.spawn("ringbolt serve --rpc-socket /tmp/rpc")
        guest.until("ringbolt rpc --rpc-socket /tmp/rpc rpc_get_methods > /dev/null", 60)
        for name in keys:
            self.check(f"keyring_file_add_key name={name} path=/tmp/keys/{name}")

    def rpc(self, call):
        return self.guest.run(f"ringbolt rpc --rpc-socket /tmp/rpc {call}", 60)

    def check(self, call):
        """-> the output of a call that succeeds."""
        done = self.rpc(call)
        assert done.rc == 0, f"{call}: {done.out}"
        return done.out

    def attach(self, options):
        """Attaches the subsystem, whose namespace is the bdev nn1."""
        attached = self.check(f"bdev_nvme_attach_controller {self.path} {options}")
        assert "nn1" in attached, attached

    def is_rejected(self, options):
        attached = self.rpc(f"bdev_nvme_attach_controller {self.path} {options}")
        assert attached.rc != 0, f"attached with {options}"

    def detach(self):
        self.check("bdev_nvme_detach_controller name=n")

    def end(self):
        self.guest.check("killall ringbolt")
        self.job.wait(timeout=30)
