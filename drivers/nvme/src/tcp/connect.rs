//! Setup of every queue of an association: the TCP connection and the Connect command.

use std::net::SocketAddr;

use sockets::CoreNetwork;
use wire_nvme::Sqe;
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, Nqn};

use super::association::AssociationHandle;
use super::queue::TcpQueue;
use crate::error::NvmeOpenError;
use crate::options::Options;
use crate::uri::TcpUri;

/// Opens a connection and creates a queue of `entries` entries on it, with its ICReq queued.
pub(super) fn connect<N: CoreNetwork>(
    network: &mut N,
    address: SocketAddr,
    entries: u32,
    uri: &TcpUri,
    options: &Options,
) -> Result<TcpQueue, NvmeOpenError> {
    let stream = network.connect(&address.into());
    let id = stream.and_then(|stream| {
        if options.ack_timeout_ms > 0 {
            network.set_ack_timeout(&stream, options.ack_timeout_ms)?;
        }
        network.add(stream)
    });
    let id = id.map_err(|error| NvmeOpenError::Connect(address, error))?;
    // One entry of a queue always stays empty (Base 2.0, section 3.3.1.5), to distinguish full from empty.
    Ok(TcpQueue::new(id, entries - 1, uri.header_digest, uri.data_digest))
}

/// Default host NQN: the UUID form of the host identifier.
fn host_nqn(id: &[u8; 16]) -> Nqn {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    Nqn::new(&format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")).expect("the UUID form is an NQN")
}

/// Builds the Connect command for a queue, and its data.
pub(super) fn connect_command(
    association: &AssociationHandle,
    qid: u16,
    entries: u32,
    cntlid: u16,
) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let options = &association.options;
    let hostnqn = options.hostnqn.clone().unwrap_or_else(|| host_nqn(&options.host_id));
    let subnqn = association.uri.subnqn.clone();
    let mut data = [0; CONNECT_DATA_SIZE];
    ConnectData { host_id: options.host_id, cntlid, subnqn, hostnqn }.encode(&mut data);
    let connect = Connect {
        record_format: 0,
        qid,
        queue_entries: entries,
        // The driver does not use SQHD, because slots bound the queue. Without flow control the controller may
        // omit response capsules after C2HData with SUCCESS.
        attributes: ConnectAttributes::DISABLE_SQ_FLOW_CONTROL,
        kato_ms: if qid == 0 { options.keep_alive_ms } else { 0 },
    };
    (connect.to_sqe(), data)
}
