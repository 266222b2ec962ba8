//! Connect: how queues come to be (Base 2.0, section 6.3).

use std::sync::Arc;

use ring::Status;
use wire_nvme::fabrics::{
    CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, InvalidParameter, Nqn,
};
use wire_nvme::log::{AddressFamily, TransportAddress};
use wire_nvme::opcode::{FABRICS, FabricsType};
use wire_nvme::sqe::{Fuse, Psdt};
use wire_nvme::{Cqe, DecodeError, Sqe};

use crate::{Association, Directory, INVALID_FIELD, Kind, Limits, QueueLease, QueueRefused, Subsystem};

/// The port that a connection came through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number; see [`Listener`](crate::Listener).
    pub portid: u16,
    /// The address that the host came to.
    pub address: TransportAddress,
}

impl Default for Port {
    /// Port 0, reached over TCP at no address.
    fn default() -> Self {
        let address = TransportAddress {
            trtype: wire_nvme::log::TransportType::Tcp,
            adrfam: AddressFamily::None,
            traddr: String::new(),
            trsvcid: String::new(),
        };
        Port { portid: 0, address }
    }
}

/// Where a Connect is answered.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    /// The target's controllers.
    pub directory: &'a Arc<Directory>,
    /// What the transport offers.
    pub limits: &'a Limits,
    /// The port that the connection came through.
    pub port: Port,
}

/// A queue that came to be.
#[derive(Debug)]
pub enum ConnectOk {
    /// An admin queue, and with it a controller.
    Admin(AdminConnect),
    /// An I/O queue of a controller that exists.
    Io(IoConnect),
}

/// What makes a [`Controller`](crate::Controller). Dropping it ends the association.
#[derive(Debug)]
pub struct AdminConnect {
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) membership: Membership,
    pub(crate) port: Port,
    /// Entries of the queue.
    pub queue_entries: u32,
    /// Keep alive timeout that was asked for; 0 for none.
    pub kato_ms: u32,
    /// The host does without SQ flow control: SQHD is FFFFh in every completion.
    pub no_flow_control: bool,
}

/// An I/O queue.
#[derive(Debug)]
pub struct IoConnect {
    /// The right to be it; kept until its last command has ended.
    pub lease: QueueLease,
    /// The subsystem as it is now.
    pub subsystem: Arc<Subsystem>,
    /// Entries of the queue.
    pub queue_entries: u32,
    /// The host does without SQ flow control: SQHD is FFFFh in every completion.
    pub no_flow_control: bool,
}

impl ConnectOk {
    /// The completion of the Connect command, but for SQHD.
    pub fn cqe(&self, cid: u16) -> Cqe {
        let connected = wire_nvme::fabrics::Connected {
            cntlid: self.association().cntlid(),
            authentication_required: false,
        };
        Cqe::new(cid, Status::SUCCESS).with_result(connected.to_result())
    }

    /// The controller.
    pub fn association(&self) -> &Arc<Association> {
        match self {
            ConnectOk::Admin(admin) => &admin.membership.association,
            ConnectOk::Io(io) => io.lease.association(),
        }
    }
}

/// A place in the directory, given back when dropped.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) directory: Arc<Directory>,
    pub(crate) association: Arc<Association>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.directory.remove(&self.association);
    }
}

/// Why a Connect failed; its completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectError {
    /// Status.
    pub status: Status,
    /// Result: which parameter was invalid, with Connect Invalid Parameters.
    pub result: u64,
}

impl ConnectError {
    /// The completion of the Connect command, but for SQHD.
    pub fn cqe(&self, cid: u16) -> Cqe {
        Cqe::new(cid, self.status).with_result(self.result)
    }

    fn parameter(in_data: bool, offset: u16) -> ConnectError {
        let result = InvalidParameter { in_data, offset }.to_result();
        ConnectError { status: Status::CONNECT_INVALID_PARAMETERS, result }
    }

    fn do_not_retry(self) -> ConnectError {
        ConnectError { status: self.status.do_not_retry(), ..self }
    }
}

impl From<Status> for ConnectError {
    fn from(status: Status) -> Self {
        ConnectError { status, result: 0 }
    }
}

/// Answers the first command of a connection.
///
/// `data` is what came with it, `subsystem` finds one by name. Retrying is called pointless (DNR) only
/// where the request itself is wrong: a subsystem, a permission or a controller that is missing now may
/// be there a second later, and a host that is told not to retry gives its namespaces up.
///
/// # Errors
/// The status to complete the command with. The host may try again on the same connection, as long as
/// the transport waits for a Connect.
pub fn connect(
    sqe: &Sqe,
    data: &[u8],
    place: &Place<'_>,
    subsystem: impl FnOnce(&Nqn) -> Option<Arc<Subsystem>>,
) -> Result<ConnectOk, ConnectError> {
    // Whatever else comes first on a queue is out of sequence (Base 2.0, section 3.3.2.2).
    if sqe.opcode != FABRICS || wire_nvme::fabrics::fabrics_type(sqe) != Ok(FabricsType::Connect) {
        return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry().into());
    }
    if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Sgl {
        return Err(INVALID_FIELD.into());
    }
    if data.len() != CONNECT_DATA_SIZE {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry().into());
    }
    let command = Connect::of(sqe);
    if command.record_format != 0 {
        let result = InvalidParameter { in_data: false, offset: Connect::RECORD_FORMAT_AT }.to_result();
        return Err(ConnectError { status: Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry(), result });
    }
    let entries_max = match command.qid {
        0 => place.limits.admin_queue_entries_max,
        _ => place.limits.io_queue_entries_max,
    };
    if !(2..=entries_max).contains(&command.queue_entries) {
        return Err(ConnectError::parameter(false, Connect::SQSIZE_AT).do_not_retry());
    }
    let data = ConnectData::decode(data).map_err(|error| match error {
        DecodeError::Value { at, .. } => ConnectError::parameter(true, at).do_not_retry(),
        DecodeError::Length { .. } => Status::DATA_SGL_LENGTH_INVALID.do_not_retry().into(),
    })?;
    let subsystem = subsystem(&data.subnqn).ok_or(ConnectError::parameter(true, ConnectData::SUBNQN_AT))?;
    subsystem.check();
    if !subsystem.allows(&data.hostnqn) || !subsystem.listens_on(place.port.portid) {
        let result = InvalidParameter { in_data: true, offset: ConnectData::HOSTNQN_AT }.to_result();
        return Err(ConnectError { status: Status::CONNECT_INVALID_HOST, result });
    }
    if command.qid == 0 {
        admin(&command, &data, place, subsystem).map(ConnectOk::Admin)
    } else {
        io(&command, &data, place, subsystem).map(ConnectOk::Io)
    }
}

fn admin(
    command: &Connect,
    data: &ConnectData,
    place: &Place<'_>,
    subsystem: Arc<Subsystem>,
) -> Result<AdminConnect, ConnectError> {
    // Controllers are of the dynamic model: a host takes any, and cannot ask for one.
    if data.cntlid != CNTLID_DYNAMIC {
        return Err(ConnectError::parameter(true, ConnectData::CNTLID_AT).do_not_retry());
    }
    let io_queues_max = match subsystem.kind {
        Kind::Nvm => place.limits.io_queues_max,
        Kind::Discovery => 0,
    };
    // Over fabrics host identifiers are 128 bits long. Without, the host says later who it is, if it does.
    let long = if place.limits.memory_based { None } else { Some(true) };
    let association = place
        .directory
        .admit(&subsystem, &data.hostnqn, data.host_id, long, io_queues_max)
        .ok_or(Status::CONNECT_CONTROLLER_BUSY)?;
    Ok(AdminConnect {
        subsystem,
        membership: Membership { directory: place.directory.clone(), association },
        port: place.port.clone(),
        queue_entries: command.queue_entries,
        kato_ms: command.kato_ms,
        no_flow_control: command.attributes.has(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL),
    })
}

fn io(
    command: &Connect,
    data: &ConnectData,
    place: &Place<'_>,
    subsystem: Arc<Subsystem>,
) -> Result<IoConnect, ConnectError> {
    if subsystem.kind == Kind::Discovery {
        return Err(ConnectError::parameter(false, Connect::QID_AT).do_not_retry());
    }
    let gone = ConnectError::parameter(true, ConnectData::CNTLID_AT);
    let association = place.directory.find(&subsystem.nqn, data.cntlid).ok_or(gone)?;
    // Names and identifier are to be those of the admin queue's Connect.
    if *association.hostnqn() != data.hostnqn {
        return Err(ConnectError::parameter(true, ConnectData::HOSTNQN_AT));
    }
    if association.host_id() != data.host_id {
        return Err(ConnectError::parameter(true, ConnectData::HOSTID_AT));
    }
    let lease = association.lease(command.qid).map_err(|refused| match refused {
        QueueRefused::Dead => gone,
        QueueRefused::OutOfRange => ConnectError::parameter(false, Connect::QID_AT).do_not_retry(),
        QueueRefused::Disabled | QueueRefused::InUse => Status::COMMAND_SEQUENCE_ERROR.into(),
    })?;
    Ok(IoConnect {
        lease,
        subsystem,
        queue_entries: command.queue_entries,
        no_flow_control: command.attributes.has(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL),
    })
}

#[cfg(test)]
mod tests;
