//! A client that sends arbitrary messages.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use wire_vfio_user::{Header, ProtocolCapabilities, VersionMessage, VfioUserCommand};

use crate::test_target::VfioUserTestTarget;

/// A client that sends arbitrary messages.
pub(crate) struct RawVfioUserClient(pub(crate) UnixStream);

impl RawVfioUserClient {
    pub(crate) fn connect(rig: &VfioUserTestTarget) -> RawVfioUserClient {
        let stream = UnixStream::connect(rig.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        RawVfioUserClient(stream)
    }

    pub(crate) fn negotiated(rig: &VfioUserTestTarget) -> RawVfioUserClient {
        let mut raw = RawVfioUserClient::connect(rig);
        let version = VersionMessage { major: 0, minor: 1, capabilities: ProtocolCapabilities::default() };
        let reply = raw.call(VfioUserCommand::Version, &version.to_bytes(), &[]).unwrap();
        assert!(!reply.0.failed);
        raw
    }

    pub(crate) fn send(&mut self, header: &Header, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let message = [&header.to_bytes()[..], payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        rustix::net::sendmsg(&self.0, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    pub(crate) fn call(
        &mut self,
        command: VfioUserCommand,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<(Header, Vec<u8>)> {
        self.send(&Header::request(1, command, payload.len()), payload, descriptors);
        self.reply()
    }

    pub(crate) fn reply(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut header = [0; Header::SIZE];
        self.0.read_exact(&mut header).ok()?;
        let header = Header::decode(&header).unwrap();
        let mut payload = vec![0; header.payload_bytes()];
        self.0.read_exact(&mut payload).ok()?;
        Some((header, payload))
    }

    /// The error number that a request fails with; 0 if it succeeds.
    pub(crate) fn errno(
        &mut self,
        command: VfioUserCommand,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> u32 {
        let (header, _) = self.call(command, payload, descriptors).expect("a reply");
        assert_eq!(header.failed, header.errno != 0);
        header.errno
    }

    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}
