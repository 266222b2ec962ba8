//! NVMe/RDMA: the private data with which a queue is connected (RDMA Transport 1.0, section 3.3.1).

use crate::DecodeError;
use crate::le::{put16, sized, u16_at};

/// Size in bytes of the private data of a request to connect.
pub const REQUEST_SIZE: usize = 32;
/// Size in bytes of the private data of an acceptance.
pub const ACCEPT_SIZE: usize = 32;
/// Size in bytes of the private data of a rejection.
pub const REJECT_SIZE: usize = 4;

wire_enum! {
    /// Why a queue is not connected (STS).
    RdmaConnectError: u16 {
        /// Invalid Private Data Length.
        PrivateDataLength = 0x01,
        /// Invalid RECFMT.
        RecordFormat = 0x02,
        /// Invalid QID.
        QueueId = 0x03,
        /// Invalid HSQSIZE.
        HostSendQueueSize = 0x04,
        /// Invalid HRQSIZE.
        HostReceiveQueueSize = 0x05,
        /// No Resources.
        NoResources = 0x06,
        /// Invalid IRD.
        InboundReads = 0x07,
        /// Invalid ORD.
        OutboundReads = 0x08,
        /// Invalid CNTLID.
        ControllerId = 0x09,
    }
}

/// The request of a host to connect a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaConnectRequest {
    /// Queue identifier (QID).
    pub qid: u16,
    /// Entries of the host's receive queue (HRQSIZE).
    pub receive_entries: u16,
    /// Entries of the host's send queue (HSQSIZE, 0's based on the wire).
    pub send_entries: u32,
    /// Controller identifier (CNTLID) of an I/O queue; 0 of hosts that do not say it.
    pub cntlid: u16,
}

impl RdmaConnectRequest {
    /// Decodes the private data, of which the connection manager may return more than the host has sent.
    ///
    /// # Errors
    /// What the host is rejected with.
    pub fn decode(from: &[u8]) -> Result<RdmaConnectRequest, RdmaConnectError> {
        let data: &[u8; REQUEST_SIZE] = from.first_chunk().ok_or(RdmaConnectError::PrivateDataLength)?;
        if u16_at(data, 0) != 0 {
            return Err(RdmaConnectError::RecordFormat);
        }
        Ok(RdmaConnectRequest {
            qid: u16_at(data, 2),
            receive_entries: u16_at(data, 4),
            send_entries: u32::from(u16_at(data, 6)) + 1,
            cntlid: u16_at(data, 8),
        })
    }

    /// Encodes the private data.
    pub fn encode(&self) -> [u8; REQUEST_SIZE] {
        let mut data = [0; REQUEST_SIZE];
        put16(&mut data, 2, self.qid);
        put16(&mut data, 4, self.receive_entries);
        put16(&mut data, 6, u16::try_from(self.send_entries.saturating_sub(1)).unwrap_or(u16::MAX));
        put16(&mut data, 8, self.cntlid);
        data
    }
}

/// The private data of an acceptance: entries of the controller's receive queue (CRQSIZE).
pub fn encode_accept(receive_entries: u16) -> [u8; ACCEPT_SIZE] {
    let mut data = [0; ACCEPT_SIZE];
    put16(&mut data, 2, receive_entries);
    data
}

/// Decodes the private data of an acceptance.
///
/// # Errors
/// It is too short.
pub fn decode_accept(from: &[u8]) -> Result<u16, DecodeError> {
    Ok(u16_at(sized::<4>("acceptance of a queue", from)?, 2))
}

/// The private data of a rejection.
pub fn encode_reject(error: RdmaConnectError) -> [u8; REJECT_SIZE] {
    let mut data = [0; REJECT_SIZE];
    put16(&mut data, 2, error.to_wire());
    data
}

/// Decodes the private data of a rejection, of which the connection manager may return more.
///
/// # Errors
/// It is too short, or the reason is unknown.
pub fn decode_reject(from: &[u8]) -> Result<RdmaConnectError, DecodeError> {
    let value = u16_at(sized::<REJECT_SIZE>("rejection of a queue", from)?, 2);
    RdmaConnectError::from_wire(value).ok_or(DecodeError::value("STS", 2, value.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_is_that_of_the_specification() {
        let request = RdmaConnectRequest { qid: 3, receive_entries: 129, send_entries: 128, cntlid: 7 };
        let data = request.encode();
        assert_eq!(data[..10], [0, 0, 3, 0, 129, 0, 127, 0, 7, 0]);
        assert_eq!(RdmaConnectRequest::decode(&data), Ok(request));
        // The connection manager pads it.
        assert_eq!(RdmaConnectRequest::decode(&[&data[..], &[0; 24]].concat()), Ok(request));
        assert_eq!(RdmaConnectRequest::decode(&data[..31]), Err(RdmaConnectError::PrivateDataLength));
        let mut other = data;
        other[0] = 1;
        assert_eq!(RdmaConnectRequest::decode(&other), Err(RdmaConnectError::RecordFormat));
        let largest = RdmaConnectRequest { send_entries: 65_536, ..request };
        assert_eq!(RdmaConnectRequest::decode(&largest.encode()), Ok(largest));
        assert_eq!(encode_accept(128)[..4], [0, 0, 128, 0]);
        assert_eq!(decode_accept(&encode_accept(128)).unwrap(), 128);
        let reject = encode_reject(RdmaConnectError::NoResources);
        assert_eq!(reject, [0, 0, 6, 0]);
        assert_eq!(decode_reject(&[&reject[..], &[0; 144]].concat()).unwrap(), RdmaConnectError::NoResources);
        assert!(decode_reject(&[0; 4]).is_err() && decode_reject(&reject[..3]).is_err());
    }
}
