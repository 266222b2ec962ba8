//! The client's half of a handshake, for a connection that the kernel then uses.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use wire_nbd::{
    ClientFlags, ExportReply, HandshakeFlags, Info, InfoRequest, NbdGreeting, OPTION_REPLY_ERROR, OptionCode,
    OptionHeader, OptionReplyHeader, OptionReplyKind,
};

/// The target is in this process.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The replies to GO: the export, its name, its description and its block sizes, and the acknowledgement.
const REPLIES_MAX: u32 = 16;
const REPLY_BYTES_MAX: u32 = 16 << 10;

/// Connects to an export at a UNIX socket and enters the transmission phase.
///
/// # Errors
/// Those of the socket; `Other` with what the target said if it refuses.
pub(super) fn connect(path: &Path, export: &str) -> io::Result<(UnixStream, ExportReply)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let reply = negotiate(&mut stream, export)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok((stream, reply))
}

fn negotiate(stream: &mut (impl Read + Write), export: &str) -> io::Result<ExportReply> {
    let invalid = |error| io::Error::new(ErrorKind::InvalidData, error);
    let mut greeting = [0; NbdGreeting::SIZE];
    stream.read_exact(&mut greeting)?;
    if !NbdGreeting::decode(&greeting).map_err(invalid)?.flags.contains(HandshakeFlags::FIXED_NEWSTYLE) {
        return Err(ErrorKind::Unsupported.into());
    }
    let mut data = Vec::new();
    InfoRequest::encode(export, &[], &mut data);
    let header = OptionHeader { option: OptionCode::Go as u32, length: data.len() as u32 };
    let flags = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
    let mut request = [&flags.to_bytes()[..], &header.to_bytes()[..]].concat();
    request.append(&mut data);
    stream.write_all(&request)?;
    let mut found = None;
    for _ in 0..REPLIES_MAX {
        let mut header = [0; OptionReplyHeader::SIZE];
        stream.read_exact(&mut header)?;
        let header = OptionReplyHeader::decode(&header).map_err(invalid)?;
        if header.length > REPLY_BYTES_MAX {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut data = vec![0; header.length as usize];
        stream.read_exact(&mut data)?;
        match header.kind {
            OptionReplyKind::Ack => return found.ok_or_else(|| ErrorKind::InvalidData.into()),
            OptionReplyKind::Info => {
                if let Info::Export(export) = Info::decode(&data).map_err(invalid)? {
                    found = Some(export);
                }
            }
            kind if kind as u32 & OPTION_REPLY_ERROR != 0 => {
                return Err(io::Error::other(format!("{kind:?}: {}", String::from_utf8_lossy(&data))));
            }
            _ => {}
        }
    }
    Err(ErrorKind::InvalidData.into())
}
