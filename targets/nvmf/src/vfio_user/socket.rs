//! The socket that stands for a device: its file, and the messages of the client that has it.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use wire_vfio_user::{Header, Kind};

/// Name of the socket in the directory that is listened on.
const NAME: &str = "cntrl";
/// Descriptors that a message may carry, as the client is told.
pub(super) const DESCRIPTORS_MAX: usize = 8;
/// Bytes of data that a message may carry, as the client is told. No region is larger.
pub(super) const DATA_BYTES_MAX: u32 = 64 << 10;
/// Bytes of a message's payload: data and what stands before it.
const PAYLOAD_BYTES_MAX: usize = DATA_BYTES_MAX as usize + 4096;
/// Bytes of replies that wait for a client that does not read.
const UNSENT_BYTES_MAX: usize = 1 << 20;

/// A listening socket whose file goes when it is dropped.
pub(super) struct Listening {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: the file is only removed if it is still ours.
    identity: (u64, u64),
}

impl Listening {
    /// Listens on `cntrl` in a directory that exists, mode 0600. A socket that nobody answers on is
    /// replaced, anything else is not.
    pub(super) fn bind(directory: &str) -> io::Result<Listening> {
        let directory = Path::new(directory);
        if !directory.is_dir() {
            return Err(io::Error::new(ErrorKind::NotFound, "the directory does not exist"));
        }
        let path = directory.join(NAME);
        check_free(&path)?;
        // Bound where nobody else can reach it, opened to its owner, then moved into place: there is no
        // moment at which another user could connect.
        let nursery = directory.join(format!(".{NAME}.{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&nursery)?;
        let fresh = nursery.join("s");
        let bound = UnixListener::bind(&fresh).and_then(|listener| {
            fs::set_permissions(&fresh, Permissions::from_mode(0o600))?;
            fs::rename(&fresh, &path)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let _ = fs::remove_file(&fresh);
        let _ = fs::remove_dir(&nursery);
        let listener = bound?;
        let metadata = fs::symlink_metadata(&path)?;
        Ok(Listening { listener, path, identity: (metadata.dev(), metadata.ino()) })
    }

    /// A client that has connected, if there is one.
    pub(super) fn accept(&self) -> Option<UnixStream> {
        let (stream, _) = self.listener.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(stream)
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let ours = |metadata: fs::Metadata| (metadata.dev(), metadata.ino()) == self.identity;
        if fs::symlink_metadata(&self.path).is_ok_and(ours) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn check_free(path: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !metadata.file_type().is_socket() {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "'cntrl' is there and is not a socket"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(ErrorKind::AddrInUse, "another process serves a device there")),
    }
}

/// A message of the client.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// What is said to the client, but for the header.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) payload: Vec<u8>,
    pub(super) descriptor: Option<std::rc::Rc<OwnedFd>>,
}

/// Why a client is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum End {
    #[error("the client has gone")]
    Gone,
    #[error("the client sent what is no message: {0}")]
    Garbage(&'static str),
    #[error("the client does not read what it is answered")]
    Deaf,
}

/// The connection to a client, read and written without waiting.
pub(super) struct Stream {
    stream: UnixStream,
    head: [u8; Header::SIZE],
    /// The message that is being received, once its header is here.
    current: Option<Message>,
    filled: usize,
    descriptors: Vec<OwnedFd>,
    unsent: Vec<u8>,
    sent: usize,
}

impl Stream {
    pub(super) fn new(stream: UnixStream) -> Stream {
        Stream {
            stream,
            head: [0; Header::SIZE],
            current: None,
            filled: 0,
            descriptors: Vec::new(),
            unsent: Vec::new(),
            sent: 0,
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The next message; `None` when there is none yet.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, End> {
        loop {
            if self.current.is_none() {
                if self.filled < Header::SIZE {
                    // Exactly the header: descriptors come with the first bytes of their message.
                    let got = receive(&self.stream, &mut self.head[self.filled..], &mut self.descriptors)?;
                    let Some(got) = got else { return Ok(None) };
                    self.filled += got;
                    continue;
                }
                let header = Header::decode(&self.head).map_err(|_| End::Garbage("its header"))?;
                if header.payload_bytes() > PAYLOAD_BYTES_MAX {
                    return Err(End::Garbage("it is too long"));
                }
                if header.kind == Kind::Reply {
                    return Err(End::Garbage("a reply to nothing"));
                }
                let descriptors = std::mem::take(&mut self.descriptors);
                self.current =
                    Some(Message { header, payload: vec![0; header.payload_bytes()], descriptors });
                self.filled = 0;
            }
            if let Some(message) = &mut self.current
                && self.filled < message.payload.len()
            {
                let into = &mut message.payload[self.filled..];
                let Some(got) = receive(&self.stream, into, &mut message.descriptors)? else {
                    return Ok(None);
                };
                self.filled += got;
                continue;
            }
            self.filled = 0;
            return Ok(self.current.take());
        }
    }

    /// Answers, or keeps the answer until there is room for it.
    pub(super) fn send(&mut self, header: &Header, reply: &Reply) -> Result<(), End> {
        self.flush()?;
        let mut message = header.to_bytes().to_vec();
        message.extend(&reply.payload);
        let mut sent = 0;
        if self.unsent.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors: Vec<BorrowedFd<'_>> =
                reply.descriptor.iter().map(|descriptor| descriptor.as_fd()).collect();
            if !descriptors.is_empty() {
                let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
                assert!(fits, "there is room for one descriptor");
            }
            sent = send(&self.stream, &message, &mut control)?;
        }
        // A descriptor cannot wait: it went with the first byte, or the client has not read for long.
        if sent == 0 && reply.descriptor.is_some() || self.unsent.len() + message.len() > UNSENT_BYTES_MAX {
            return Err(End::Deaf);
        }
        self.unsent.extend(&message[sent..]);
        Ok(())
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn flush(&mut self) -> Result<(), End> {
        while self.sent < self.unsent.len() {
            let sent = send(&self.stream, &self.unsent[self.sent..], &mut SendAncillaryBuffer::default())?;
            if sent == 0 {
                return Ok(());
            }
            self.sent += sent;
        }
        self.unsent.clear();
        self.sent = 0;
        Ok(())
    }
}

/// Some bytes, and the descriptors that came with them; `None` when there are none yet.
fn receive(
    stream: &UnixStream,
    into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<Option<usize>, End> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    loop {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(into)], &mut control, flags);
        match received {
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = message {
                        descriptors.extend(rights);
                    }
                }
                // Those that had no room were closed by the kernel.
                if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > DESCRIPTORS_MAX {
                    return Err(End::Garbage("it carries too many descriptors"));
                }
                if received.bytes == 0 {
                    return Err(End::Gone);
                }
                return Ok(Some(received.bytes));
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(_) => return Err(End::Gone),
        }
    }
}

/// How many bytes went.
fn send(
    stream: &UnixStream,
    bytes: &[u8],
    control: &mut SendAncillaryBuffer<'_, '_, '_>,
) -> Result<usize, End> {
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], control, flags) {
            Ok(sent) => return Ok(sent),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            Err(_) => return Err(End::Gone),
        }
    }
}
