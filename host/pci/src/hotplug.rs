//! PCI hotplug events from kernel uevents.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::PciAddress;

/// A netlink socket that receives the kernel's uevents of PCI functions.
///
/// It is non-blocking: watch its descriptor with `os::EventLoop`, and at each event call
/// [`receive`](HotplugMonitor::receive) until it returns `None`. It needs no privileges, but the kernel sends no
/// uevents to a network namespace of another user namespace.
pub struct HotplugMonitor {
    socket: OwnedFd,
}

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HotplugEvent {
    /// A uevent of a PCI function.
    Function(Uevent),
    /// A message about another kind of device.
    Other,
    /// Messages were lost: call [`enumerate`](crate::enumerate) to resynchronise.
    Missed,
}

/// A uevent of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uevent {
    /// The action.
    pub kind: UeventKind,
    /// The function.
    pub address: PciAddress,
    /// Its class code.
    pub class: Option<u32>,
    /// The driver that it was bound to or unbound from.
    pub driver: Option<String>,
}

/// The action of a uevent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UeventKind {
    /// The function was added.
    Add,
    /// The function was removed.
    Remove,
    /// A driver was bound.
    Bind,
    /// The driver was unbound.
    Unbind,
    /// Any other action: move, online, offline, change.
    Change,
}

/// The kernel's limit for one message is 2 KiB of properties and a path.
const MESSAGE_BYTES_MAX: usize = 8192;
/// Receive buffer for a few hundred messages: the removal of a whole drive shelf.
const RECEIVE_BYTES: usize = 1 << 20;
/// The multicast group of kernel uevents; udev uses another.
const KERNEL_GROUP: u32 = 1;

impl HotplugMonitor {
    /// Opens the socket; it receives events from now on.
    pub fn new() -> io::Result<HotplugMonitor> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::DGRAM;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        // A smaller buffer is acceptable: an overflow is reported as `Missed`.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BYTES);
        Ok(HotplugMonitor { socket })
    }

    /// Receives the next message; `None` if there is none now.
    pub fn receive(&mut self) -> io::Result<Option<HotplugEvent>> {
        let mut message = [0; MESSAGE_BYTES_MAX];
        let received = rustix::net::recvfrom(&self.socket, &mut message[..], RecvFlags::TRUNC);
        let (length, sender) = match received {
            Ok((_, length, sender)) => (length, sender),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(rustix::io::Errno::NOBUFS) => return Ok(Some(HotplugEvent::Missed)),
            Err(error) => return Err(error.into()),
        };
        // Other processes may send to the group too; only the kernel's port is 0.
        let sender = sender.and_then(|any| SocketAddrNetlink::try_from(any).ok());
        if sender.is_none_or(|sender| sender.pid() != 0) {
            return Ok(Some(HotplugEvent::Other));
        }
        let Some(message) = message.get(..length) else { return Ok(Some(HotplugEvent::Missed)) };
        Ok(Some(Uevent::parse(message).map_or(HotplugEvent::Other, HotplugEvent::Function)))
    }
}

impl AsFd for HotplugMonitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Uevent {
    /// Parses a message: `action@path`, then properties, each terminated by a zero byte. `None` if it is not about
    /// a PCI function.
    pub fn parse(message: &[u8]) -> Option<Uevent> {
        let mut fields = message.split(|byte| *byte == 0).filter_map(|field| str::from_utf8(field).ok());
        let (_, path) = fields.next()?.split_once('@')?;
        let (mut action, mut subsystem, mut slot, mut class, mut driver) = (None, None, None, None, None);
        for field in fields {
            let Some((name, value)) = field.split_once('=') else { continue };
            match name {
                "ACTION" => action = Some(value),
                "SUBSYSTEM" => subsystem = Some(value),
                "PCI_SLOT_NAME" => slot = Some(value),
                "PCI_CLASS" => class = u32::from_str_radix(value, 16).ok(),
                "DRIVER" => driver = Some(value.to_string()),
                _ => {}
            }
        }
        if subsystem != Some("pci") {
            return None;
        }
        let kind = match action? {
            "add" => UeventKind::Add,
            "remove" => UeventKind::Remove,
            "bind" => UeventKind::Bind,
            "unbind" => UeventKind::Unbind,
            _ => UeventKind::Change,
        };
        let address = slot.or_else(|| path.rsplit('/').next())?.parse().ok()?;
        Some(Uevent { kind, address, class, driver })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // As a 6.12 kernel sends them.
    const ADD: &[u8] = b"add@/devices/pci0000:00/0000:00:04.0\0ACTION=add\0\
        DEVPATH=/devices/pci0000:00/0000:00:04.0\0SUBSYSTEM=pci\0PCI_CLASS=10802\0PCI_ID=1B36:0010\0\
        PCI_SUBSYS_ID=1AF4:1100\0PCI_SLOT_NAME=0000:00:04.0\0\
        MODALIAS=pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02\0SEQNUM=1203\0";

    #[test]
    fn kernel_uevents_are_parsed() {
        let address = "0000:00:04.0".parse().unwrap();
        let expected = Uevent { kind: UeventKind::Add, address, class: Some(0x10802), driver: None };
        assert_eq!(Uevent::parse(ADD), Some(expected));
        let bind = b"bind@/devices/pci0000:00/0000:00:04.0\0ACTION=bind\0\
            DEVPATH=/devices/pci0000:00/0000:00:04.0\0SUBSYSTEM=pci\0DRIVER=nvme\0PCI_CLASS=10802\0SEQNUM=9\0";
        let bound = Uevent::parse(bind).unwrap();
        assert_eq!(
            (bound.kind, bound.address, bound.driver.as_deref()),
            (UeventKind::Bind, address, Some("nvme"))
        );
    }

    #[test]
    fn messages_about_other_devices_are_ignored() {
        for message in [
            b"".as_slice(),
            b"libudev\0\xfe\xed\xca\xfe",
            b"add@/devices/virtual/block/loop0\0ACTION=add\0SUBSYSTEM=block\0",
            b"add@/devices/pci0000:00\0ACTION=add\0SUBSYSTEM=pci\0",
            b"add@/devices/x\0ACTION=add\0SUBSYSTEM=pci\0PCI_SLOT_NAME=../..\0",
            b"@\0SUBSYSTEM=pci\0PCI_SLOT_NAME=0000:00:04.0\0",
        ] {
            assert_eq!(Uevent::parse(message), None, "{}", String::from_utf8_lossy(message));
        }
    }

    #[test]
    fn receive_returns_none_without_messages() {
        // A sandbox without netlink: nothing to test.
        let Ok(mut hotplug) = HotplugMonitor::new() else { return };
        for _ in 0..1000 {
            if hotplug.receive().unwrap().is_none() {
                return;
            }
        }
        panic!("1,000 uevents within a test");
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_never_panics(message in proptest::collection::vec(any::<u8>(), 0..300)) {
            Uevent::parse(&message);
        }

        #[test]
        fn parsing_a_mutated_message_never_panics(at in 0usize..200, byte: u8, cut in 0usize..256) {
            let mut message = ADD.to_vec();
            let index = at % message.len();
            message[index] = byte;
            message.truncate(cut.min(message.len()));
            Uevent::parse(&message);
        }
    }
}
