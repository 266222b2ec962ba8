//! Functions that come and go: the kernel's uevents.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::Address;

/// The kernel's messages about PCI functions. Non-blocking: watch its descriptor with
/// `sys::Events`, and at each report call [`receive`](Hotplug::receive) until there is none.
///
/// Needs no privileges. In a network namespace that belongs to another user namespace the kernel sends
/// nothing.
pub struct Hotplug {
    socket: OwnedFd,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Something happened to a PCI function.
    Function(Uevent),
    /// Something happened to another kind of device.
    Other,
    /// Messages were lost: compare with [`enumerate`](crate::enumerate).
    Missed,
}

/// What happened to a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uevent {
    /// What.
    pub kind: UeventKind,
    /// To which.
    pub address: Address,
    /// Its class code.
    pub class: Option<u32>,
    /// The driver that it was bound to or taken from.
    pub driver: Option<String>,
}

/// Kinds of uevents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UeventKind {
    /// It is there.
    Add,
    /// It is gone.
    Remove,
    /// It was bound to a driver.
    Bind,
    /// It was taken from its driver.
    Unbind,
    /// Anything else: moved, online, offline, changed.
    Change,
}

/// The kernel's limit for one message is 2 KiB of properties and a path.
const MESSAGE_BYTES_MAX: usize = 8192;
/// Room for a few hundred messages: a shelf of drives that is pulled at once.
const RECEIVE_BYTES: usize = 1 << 20;
/// The kernel's multicast group; udev's is another.
const KERNEL_GROUP: u32 = 1;

impl Hotplug {
    /// Listens from now on.
    pub fn new() -> io::Result<Hotplug> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::DGRAM;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        // Less than wanted is no failure: what does not fit is reported as missed.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BYTES);
        Ok(Hotplug { socket })
    }

    /// The next message; `None` when there is none now.
    pub fn receive(&mut self) -> io::Result<Option<Notice>> {
        let mut message = [0; MESSAGE_BYTES_MAX];
        let received = rustix::net::recvfrom(&self.socket, &mut message[..], RecvFlags::TRUNC);
        let (length, sender) = match received {
            Ok((_, length, sender)) => (length, sender),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(rustix::io::Errno::NOBUFS) => return Ok(Some(Notice::Missed)),
            Err(error) => return Err(error.into()),
        };
        // Other processes may send to the group too; only the kernel has no port.
        let sender = sender.and_then(|any| SocketAddrNetlink::try_from(any).ok());
        if sender.is_none_or(|sender| sender.pid() != 0) {
            return Ok(Some(Notice::Other));
        }
        let Some(message) = message.get(..length) else { return Ok(Some(Notice::Missed)) };
        Ok(Some(Uevent::parse(message).map_or(Notice::Other, Notice::Function)))
    }
}

impl AsFd for Hotplug {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Uevent {
    /// Reads a message: `action@path`, then properties, each ended by a zero byte. `None` if it is not
    /// about a PCI function.
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
    fn messages_of_the_kernel_are_read() {
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
    fn what_is_not_about_a_function_is_left_alone() {
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
    fn a_socket_without_news_says_so() {
        // Where the sandbox has no netlink there is nothing to look at.
        let Ok(mut hotplug) = Hotplug::new() else { return };
        for _ in 0..1000 {
            if hotplug.receive().unwrap().is_none() {
                return;
            }
        }
        panic!("1,000 uevents within a test");
    }

    proptest! {
        #[test]
        fn any_message_is_read_or_refused(message in proptest::collection::vec(any::<u8>(), 0..300)) {
            Uevent::parse(&message);
        }

        #[test]
        fn a_changed_message_does_no_harm(at in 0usize..200, byte: u8, cut in 0usize..256) {
            let mut message = ADD.to_vec();
            let index = at % message.len();
            message[index] = byte;
            message.truncate(cut.min(message.len()));
            Uevent::parse(&message);
        }
    }
}
