//! The kernel's NBD driver by generic netlink (`include/uapi/linux/nbd-netlink.h`, `genetlink.h`).

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// A message's type: an error, or an acknowledgement if its number is 0.
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;

/// The family that resolves the numbers of families.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const NBD_CMD_CONNECT: u8 = 1;
const NBD_CMD_DISCONNECT: u8 = 2;
const NBD_CMD_RECONFIGURE: u8 = 3;
const NBD_ATTR_INDEX: u16 = 1;
const NBD_ATTR_SIZE_BYTES: u16 = 2;
const NBD_ATTR_BLOCK_SIZE_BYTES: u16 = 3;
const NBD_ATTR_SERVER_FLAGS: u16 = 5;
const NBD_ATTR_SOCKETS: u16 = 7;
const NBD_ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
const NBD_ATTR_BACKEND_IDENTIFIER: u16 = 10;
const NBD_SOCK_ITEM: u16 = 1;
const NBD_SOCK_FD: u16 = 1;
const NESTED: u16 = 1 << 15;

/// The kernel answers at once, but for a disconnect that waits for requests.
const TIMEOUT: Duration = Duration::from_secs(30);
const REPLY_BYTES_MAX: usize = 8192;

/// A device of the kernel to be connected.
pub(super) struct KernelConnect<'a> {
    /// The number N of `/dev/nbdN`; the kernel chooses without one.
    pub(super) index: Option<u32>,
    pub(super) size: u64,
    pub(super) block_size: u32,
    /// Transmission flags.
    pub(super) flags: u16,
    /// In the transmission phase.
    pub(super) sockets: &'a [BorrowedFd<'a>],
    /// What names the server to a later one: only that may reconnect the device.
    pub(super) backend: &'a str,
    /// Seconds that requests wait for another connection when there is none.
    pub(super) reconnect_timeout_s: u32,
}

/// A socket for requests to the driver.
pub(super) struct NbdNetlink {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl NbdNetlink {
    /// # Errors
    /// `ENOENT` if the kernel has no NBD driver.
    pub(super) fn open() -> Result<NbdNetlink, Errno> {
        let flags = SocketFlags::CLOEXEC;
        let generic = Some(rustix::net::netlink::GENERIC);
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, generic)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT))?;
        let mut netlink = NbdNetlink { socket, family: GENL_ID_CTRL, sequence: 0 };
        let mut name = Vec::new();
        attribute(&mut name, CTRL_ATTR_FAMILY_NAME, b"nbd\0");
        let reply = netlink.request(CTRL_CMD_GETFAMILY, &name)?;
        let family = find_attribute(&reply, CTRL_ATTR_FAMILY_ID).and_then(|value| value.first_chunk::<2>());
        netlink.family = family.map(|id| u16::from_ne_bytes(*id)).ok_or(Errno::NOENT)?;
        Ok(netlink)
    }

    /// Connects a device, and returns its number.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_ADMIN, `EBUSY` if the device is connected.
    pub(super) fn connect(&mut self, connect: &KernelConnect<'_>) -> Result<u32, Errno> {
        let mut attributes = Vec::new();
        if let Some(index) = connect.index {
            attribute(&mut attributes, NBD_ATTR_INDEX, &index.to_ne_bytes());
        }
        attribute(&mut attributes, NBD_ATTR_SIZE_BYTES, &connect.size.to_ne_bytes());
        attribute(&mut attributes, NBD_ATTR_BLOCK_SIZE_BYTES, &u64::from(connect.block_size).to_ne_bytes());
        attribute(&mut attributes, NBD_ATTR_SERVER_FLAGS, &u64::from(connect.flags).to_ne_bytes());
        attribute_connection(&mut attributes, connect);
        let reply = self.request(NBD_CMD_CONNECT, &attributes)?;
        let index = find_attribute(&reply, NBD_ATTR_INDEX).and_then(|value| value.first_chunk::<4>());
        index.map(|index| u32::from_ne_bytes(*index)).ok_or(Errno::PROTO)
    }

    /// Gives a connected device sockets instead of those that are dead.
    ///
    /// # Errors
    /// `EINVAL` if the device is not connected, or has another backend.
    pub(super) fn reconnect(&mut self, index: u32, connect: &KernelConnect<'_>) -> Result<(), Errno> {
        let mut attributes = Vec::new();
        attribute(&mut attributes, NBD_ATTR_INDEX, &index.to_ne_bytes());
        attribute_connection(&mut attributes, connect);
        self.request(NBD_CMD_RECONFIGURE, &attributes).map(drop)
    }

    /// Disconnects a device. One that is not connected is no error.
    pub(super) fn disconnect(&mut self, index: u32) -> Result<(), Errno> {
        let mut attributes = Vec::new();
        attribute(&mut attributes, NBD_ATTR_INDEX, &index.to_ne_bytes());
        self.request(NBD_CMD_DISCONNECT, &attributes).map(drop)
    }

    /// Sends a command, and returns the attributes of the reply; none if the kernel only acknowledges it.
    fn request(&mut self, command: u8, attributes: &[u8]) -> Result<Vec<u8>, Errno> {
        self.sequence += 1;
        let message = encode(self.family, command, self.sequence, attributes);
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, &message, SendFlags::empty(), &kernel)?;
        let mut reply = Vec::new();
        loop {
            let mut buffer = [0; REPLY_BYTES_MAX];
            let (_, length) = match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Err(Errno::INTR) => continue,
                // The time-out.
                Err(Errno::AGAIN) => return Err(Errno::TIMEDOUT),
                other => other?,
            };
            match parse(&buffer[..length.min(REPLY_BYTES_MAX)], self.sequence, &mut reply)? {
                true => return Ok(reply),
                false => continue,
            }
        }
    }
}

fn encode(family: u16, command: u8, sequence: u32, attributes: &[u8]) -> Vec<u8> {
    let length = (HEADER_BYTES + GENERIC_HEADER_BYTES + attributes.len()) as u32;
    let mut message = Vec::with_capacity(length as usize);
    message.extend(length.to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    message.extend([0; 4]);
    // The version of both families is 1.
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    message
}

/// Appends an attribute; `kind` is its number, and [`NESTED`] if the value is attributes.
fn attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    out.extend((4 + value.len() as u16).to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// The sockets, and what is to happen without them.
fn attribute_connection(out: &mut Vec<u8>, connect: &KernelConnect<'_>) {
    let timeout_s = u64::from(connect.reconnect_timeout_s);
    attribute(out, NBD_ATTR_DEAD_CONN_TIMEOUT, &timeout_s.to_ne_bytes());
    attribute(out, NBD_ATTR_BACKEND_IDENTIFIER, &[connect.backend.as_bytes(), &[0]].concat());
    let mut sockets = Vec::new();
    for socket in connect.sockets {
        let mut item = Vec::new();
        attribute(&mut item, NBD_SOCK_FD, &(socket.as_raw_fd() as u32).to_ne_bytes());
        attribute(&mut sockets, NBD_SOCK_ITEM | NESTED, &item);
    }
    attribute(out, NBD_ATTR_SOCKETS | NESTED, &sockets);
}

/// The value of the first attribute of a kind.
fn find_attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    while let Some((head, rest)) = attributes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]])).checked_sub(4)?;
        let value = rest.get(..length)?;
        if u16::from_ne_bytes([head[2], head[3]]) & !NESTED == kind {
            return Some(value);
        }
        attributes = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

/// Reads the messages of a datagram: the attributes of a reply go to `reply`. Returns whether the request is
/// acknowledged.
fn parse(mut bytes: &[u8], sequence: u32, reply: &mut Vec<u8>) -> Result<bool, Errno> {
    while let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        let word =
            |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (length, kind) = (word(0) as usize, u16::from_ne_bytes([header[4], header[5]]));
        let body = bytes.get(HEADER_BYTES..length).ok_or(Errno::PROTO)?;
        if word(8) == sequence && kind == NLMSG_ERROR {
            let code = body.first_chunk::<4>().map(|code| i32::from_ne_bytes(*code)).ok_or(Errno::PROTO)?;
            return if code == 0 { Ok(true) } else { Err(Errno::from_raw_os_error(-code)) };
        }
        if word(8) == sequence {
            *reply = body.get(GENERIC_HEADER_BYTES..).unwrap_or_default().to_vec();
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_found() {
        let mut attributes = Vec::new();
        attribute(&mut attributes, CTRL_ATTR_FAMILY_NAME, b"nbd\0\0");
        attribute(&mut attributes, NBD_ATTR_SOCKETS | NESTED, &[1, 2]);
        assert_eq!(attributes.len(), 12 + 8);
        assert_eq!(attributes[..4], [9, 0, 2, 0]);
        assert_eq!(find_attribute(&attributes, NBD_ATTR_SOCKETS), Some(&[1, 2][..]));
        assert_eq!(find_attribute(&attributes, 9), None);
        assert_eq!(find_attribute(&[3, 0, 1, 0], 1), None, "shorter than its head");
        assert_eq!(find_attribute(&[9, 0, 1, 0, 1], 1), None, "truncated");
    }

    #[test]
    fn replies_end_with_an_acknowledgement_or_an_error() {
        let error = |sequence: u32, code: i32| {
            let mut message = encode(NLMSG_ERROR, 0, sequence, &[]);
            message[HEADER_BYTES..].copy_from_slice(&code.to_ne_bytes());
            message
        };
        let mut attributes = Vec::new();
        attribute(&mut attributes, NBD_ATTR_INDEX, &7u32.to_ne_bytes());
        let mut datagram = encode(27, NBD_CMD_CONNECT, 5, &attributes);
        datagram.extend(error(4, -1));
        let mut reply = Vec::new();
        assert_eq!(parse(&datagram, 5, &mut reply), Ok(false), "another request's error");
        assert_eq!(reply, attributes);
        assert_eq!(parse(&error(5, 0), 5, &mut reply), Ok(true));
        assert_eq!(parse(&error(5, -16), 5, &mut reply), Err(Errno::BUSY));
        let short = &error(5, 0)[..18];
        assert_eq!(parse(short, 5, &mut reply), Err(Errno::PROTO));
    }
}
