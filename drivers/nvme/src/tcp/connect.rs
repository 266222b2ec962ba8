//! How every queue of an association begins: a connection, and the Connect command.

use std::net::SocketAddr;

use net::{Network, Sockets};
use wire_nvme::Sqe;
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, Nqn};

use super::association::Membership;
use super::queue::Queue;
use crate::error::OpenError;
use crate::uri::TcpUri;

/// Opens a connection, with a queue of `entries` entries on it whose ICReq is on its way.
pub(super) fn connect(
    network: &mut Sockets,
    address: SocketAddr,
    entries: u32,
    uri: &TcpUri,
) -> Result<Queue, OpenError> {
    let stream = net::connect(address).map_err(|error| OpenError::Connect(address, error))?;
    let id = network.add(stream).map_err(|error| OpenError::Connect(address, error))?;
    // One entry of a queue always stays empty (Base 2.0, section 3.3.1.5), so that full is not empty.
    Ok(Queue::new(id, entries - 1, uri.header_digest, uri.data_digest))
}

/// The name of a host that has none: the UUID form of its identifier.
fn host_nqn(id: &[u8; 16]) -> Nqn {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    Nqn::new(&format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")).expect("the UUID form is an NQN")
}

/// The Connect command for a queue, and its data.
pub(super) fn connect_command(
    membership: &Membership,
    qid: u16,
    entries: u32,
    cntlid: u16,
) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let options = &membership.options;
    let hostnqn = options.hostnqn.clone().unwrap_or_else(|| host_nqn(&options.host_id));
    let subnqn = membership.uri.subnqn.clone();
    let mut data = [0; CONNECT_DATA_SIZE];
    ConnectData { host_id: options.host_id, cntlid, subnqn, hostnqn }.encode(&mut data);
    let connect = Connect {
        record_format: 0,
        qid,
        queue_entries: entries,
        // SQHD means nothing to a queue whose slots bound it: the controller may leave out responses where
        // data says it all.
        attributes: ConnectAttributes(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL),
        kato_ms: if qid == 0 { options.keep_alive_ms } else { 0 },
    };
    (connect.to_sqe(), data)
}
