//! The Connect command, which every queue of an association begins with.

use wire_nvme::Sqe;
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, Nqn};

use crate::options::Options;

/// Default host NQN: the UUID form of the host identifier.
fn host_nqn(id: &[u8; 16]) -> Nqn {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    Nqn::new(&format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")).expect("the UUID form is an NQN")
}

/// NQN of the host.
pub(crate) fn hostnqn(options: &Options) -> Nqn {
    options.hostnqn.clone().unwrap_or_else(|| host_nqn(&options.host_id))
}

/// Builds the Connect command for a queue, and its data.
pub(super) fn connect_command(
    options: &Options,
    subnqn: &Nqn,
    qid: u16,
    entries: u32,
    cntlid: u16,
) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let hostnqn = hostnqn(options);
    let mut data = [0; CONNECT_DATA_SIZE];
    ConnectData { host_id: options.host_id, cntlid, subnqn: subnqn.clone(), hostnqn }.encode(&mut data);
    let connect = Connect {
        record_format: 0,
        qid,
        queue_entries: entries,
        // The driver does not use SQHD, because slots bound the queue. Without flow control the controller
        // may omit response capsules after C2HData with SUCCESS.
        attributes: ConnectAttributes::DISABLE_SQ_FLOW_CONTROL,
        kato_ms: if qid == 0 { options.keep_alive_ms } else { 0 },
    };
    (connect.to_sqe(), data)
}
