//! The Connect command, which creates admin and I/O queues (Base 2.0, section 6.3).

use std::sync::Arc;

use block_io::Status;
use nvme_auth::{AuthKeys, ConcatenationRule};
use wire_nvme::fabrics::{
    CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, InvalidParameter, Nqn,
};
use wire_nvme::log::{AddressFamily, TransportAddress};
use wire_nvme::opcode::{FABRICS, FabricsType};
use wire_nvme::sqe::{Fuse, Psdt};
use wire_nvme::{Cqe, DecodeError, Sqe};

use crate::directory::ControllerRequest;
use crate::{
    ControllerAssociation, ControllerDirectory, ControllerLimits, INVALID_FIELD, LeaseError, QueueLease,
    Subsystem, SubsystemKind,
};

/// The NVM subsystem port through which a host connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemPort {
    /// The port's number; see [`SubsystemListener`](crate::SubsystemListener).
    pub portid: u16,
    /// The local address that the host connected to.
    pub address: TransportAddress,
    /// Queues through it use TLS.
    pub secure: bool,
}

impl Default for SubsystemPort {
    /// Port 0 over TCP, with an empty address.
    fn default() -> Self {
        let address = TransportAddress {
            trtype: wire_nvme::log::TransportType::Tcp,
            adrfam: AddressFamily::None,
            traddr: String::new(),
            trsvcid: String::new(),
        };
        SubsystemPort { portid: 0, address, secure: false }
    }
}

/// The target's side of a Connect command.
#[derive(Clone, Debug)]
pub struct ConnectContext<'a> {
    /// All controllers of the target.
    pub directory: &'a Arc<ControllerDirectory>,
    /// The limits of the transport.
    pub limits: &'a ControllerLimits,
    /// The port through which the host connects.
    pub port: SubsystemPort,
    /// Whose key the connection's TLS was established with; `None` without TLS.
    pub secure: Option<&'a SecureChannel>,
}

/// The two ends of a connection's TLS, as the identity of its key names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecureChannel {
    /// The host.
    pub hostnqn: Nqn,
    /// The subsystem.
    pub subnqn: Nqn,
    /// The identity of a key that the authentication of the host has generated; `None` for a configured one.
    pub generated: Option<String>,
}

impl SecureChannel {
    /// Of an identity: `NVMe1R01 HOSTNQN SUBNQN DIGEST`, `NVMe1G01 …` for a generated key, or `NVMe0R01
    /// HOSTNQN SUBNQN` (TCP 1.0, section 3.6.1.3).
    pub fn of_identity(identity: &str) -> Option<SecureChannel> {
        let mut fields = identity.split(' ');
        let version = fields.next().filter(|version| version.starts_with("NVMe"))?;
        let mut nqn = || fields.next()?.parse().ok();
        let generated = (version.as_bytes().get(5) == Some(&b'G')).then(|| identity.to_string());
        Some(SecureChannel { hostnqn: nqn()?, subnqn: nqn()?, generated })
    }

    /// Whether a host may connect to a subsystem through it: the one that its key is for, which still has a
    /// key of the host, or the discovery service. With a generated key only that subsystem, while the host
    /// may have one there.
    fn permits(&self, host: &Nqn, subsystem: &Subsystem) -> bool {
        if self.generated.is_some() {
            return self.hostnqn == *host && self.subnqn == subsystem.nqn && subsystem.concatenates(host);
        }
        let is_subsystem = self.subnqn == subsystem.nqn && subsystem.tls_hosts.contains_key(host);
        self.hostnqn == *host && (is_subsystem || subsystem.kind == SubsystemKind::Discovery)
    }
}

/// What a host has to do on a connected queue before other commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthRequirement {
    /// It has to authenticate, if it has keys.
    Authenticate,
    /// It has to authenticate with secure channel concatenation, and then to connect anew with TLS.
    Concatenate,
    /// Nothing: its TLS has a key that its authentication has generated.
    Authenticated,
}

impl AuthRequirement {
    fn of(context: &ConnectContext<'_>) -> AuthRequirement {
        match context.secure {
            Some(channel) if channel.generated.is_some() => AuthRequirement::Authenticated,
            None if context.port.secure => AuthRequirement::Concatenate,
            _ => AuthRequirement::Authenticate,
        }
    }

    /// What its exchanges accept on a queue.
    pub fn concatenation(self, qid: u16) -> ConcatenationRule {
        match (self, qid) {
            (AuthRequirement::Concatenate, 0) => ConcatenationRule::Required,
            (AuthRequirement::Authenticated, 0) => ConcatenationRule::Replaces,
            _ => ConcatenationRule::Refused,
        }
    }
}

/// A newly connected queue.
#[derive(Debug)]
pub enum ConnectOk {
    /// An admin queue, for a new controller.
    Admin(AdminConnect),
    /// An I/O queue of an existing controller.
    Io(IoConnect),
}

/// A connected admin queue, from which [`Controller::new`](crate::Controller::new) creates the controller.
/// Dropping it ends the association.
#[derive(Debug)]
pub struct AdminConnect {
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) registration: DirectoryRegistration,
    pub(crate) port: SubsystemPort,
    requirement: AuthRequirement,
    /// Entries of the queue.
    pub queue_entries: u32,
    /// Requested keep alive timeout in milliseconds; 0 for none.
    pub kato_ms: u32,
    /// The host does without SQ flow control: SQHD is FFFFh in every completion.
    pub no_flow_control: bool,
}

/// A connected I/O queue.
#[derive(Debug)]
pub struct IoConnect {
    /// The lease of its identifier; drop it after the queue's last command has completed.
    pub lease: QueueLease,
    /// The current snapshot of the subsystem.
    pub subsystem: Arc<Subsystem>,
    requirement: AuthRequirement,
    /// Entries of the queue.
    pub queue_entries: u32,
    /// The host does without SQ flow control: SQHD is FFFFh in every completion.
    pub no_flow_control: bool,
}

impl ConnectOk {
    /// The completion of the Connect command, but for SQHD.
    pub fn cqe(&self, cid: u16) -> Cqe {
        let (has_keys, requirement) = (self.keys().is_some(), self.requirement());
        let connected = wire_nvme::fabrics::ConnectResponse {
            cntlid: self.association().cntlid(),
            authentication_required: has_keys && requirement != AuthRequirement::Authenticated,
            secure_channel_required: requirement == AuthRequirement::Concatenate,
        };
        Cqe::new(cid, Status::SUCCESS).with_result(connected.to_result())
    }

    /// The keys with which the host authenticates on the queue, before any other command unless
    /// [`requirement`](Self::requirement) says otherwise; `None` if it has none.
    pub fn keys(&self) -> Option<&AuthKeys> {
        let subsystem = match self {
            ConnectOk::Admin(admin) => &admin.subsystem,
            ConnectOk::Io(io) => &io.subsystem,
        };
        subsystem.host_keys.get(self.association().hostnqn())
    }

    /// What the host has to do next.
    pub fn requirement(&self) -> AuthRequirement {
        match self {
            ConnectOk::Admin(admin) => admin.requirement,
            ConnectOk::Io(io) => io.requirement,
        }
    }

    /// The association of the queue's controller.
    pub fn association(&self) -> &Arc<ControllerAssociation> {
        match self {
            ConnectOk::Admin(admin) => &admin.registration.association,
            ConnectOk::Io(io) => io.lease.association(),
        }
    }
}

/// An entry in the controller directory; dropping it removes the controller.
#[derive(Debug)]
pub(crate) struct DirectoryRegistration {
    pub(crate) directory: Arc<ControllerDirectory>,
    pub(crate) association: Arc<ControllerAssociation>,
}

impl Drop for DirectoryRegistration {
    fn drop(&mut self) {
        self.directory.remove(&self.association);
    }
}

/// The status and result of a failed Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectError {
    /// Status of the completion.
    pub status: Status,
    /// Dword 0 of the completion: the invalid parameter, with Connect Invalid Parameters; otherwise 0.
    pub result: u64,
}

impl ConnectError {
    /// The completion of the Connect command, but for SQHD.
    pub fn cqe(&self, cid: u16) -> Cqe {
        Cqe::new(cid, self.status).with_result(self.result)
    }

    fn invalid_parameter(in_data: bool, offset: u16) -> ConnectError {
        let result = InvalidParameter { in_data, offset }.to_result();
        ConnectError { status: Status::CONNECT_INVALID_PARAMETERS, result }
    }

    fn invalid_host() -> ConnectError {
        let result = InvalidParameter { in_data: true, offset: ConnectData::HOSTNQN_AT }.to_result();
        ConnectError { status: Status::CONNECT_INVALID_HOST, result }
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

/// Executes Connect, the first command of a connection.
///
/// `data` is the command's data; `subsystem` looks up a subsystem by name. Do Not Retry is set only if the
/// command itself is invalid: a missing subsystem, permission or controller may exist a second later, and a
/// host that may not retry removes its namespaces.
///
/// # Errors
/// The status to complete the command with. The host may retry on the same connection while the transport
/// still expects a Connect.
pub fn connect(
    sqe: &Sqe,
    data: &[u8],
    context: &ConnectContext<'_>,
    subsystem: impl FnOnce(&Nqn) -> Option<Arc<Subsystem>>,
) -> Result<ConnectOk, ConnectError> {
    // Any other first command is a sequence error (Base 2.0, section 3.3.2.2).
    if sqe.opcode != FABRICS || wire_nvme::fabrics::fabrics_type(sqe) != Ok(FabricsType::Connect) {
        return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry().into());
    }
    if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Sgl {
        return Err(INVALID_FIELD.into());
    }
    if data.len() != CONNECT_DATA_SIZE {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry().into());
    }
    let command = Connect::from_sqe(sqe);
    if command.record_format != 0 {
        let result = InvalidParameter { in_data: false, offset: Connect::RECORD_FORMAT_AT }.to_result();
        return Err(ConnectError { status: Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry(), result });
    }
    let entries_max = match command.qid {
        0 => context.limits.admin_queue_entries_max,
        _ => context.limits.io_queue_entries_max,
    };
    if !(2..=entries_max).contains(&command.queue_entries) {
        return Err(ConnectError::invalid_parameter(false, Connect::SQSIZE_AT).do_not_retry());
    }
    let data = ConnectData::decode(data).map_err(|error| match error {
        // Connect data is 1024 bytes long.
        DecodeError::Value { at, .. } => ConnectError::invalid_parameter(true, at as u16).do_not_retry(),
        DecodeError::Length { .. } | DecodeError::Text { .. } => {
            Status::DATA_SGL_LENGTH_INVALID.do_not_retry().into()
        }
    })?;
    let subsystem =
        subsystem(&data.subnqn).ok_or(ConnectError::invalid_parameter(true, ConnectData::SUBNQN_AT))?;
    subsystem.check();
    if !subsystem.allows(&data.hostnqn) || !subsystem.listens_on(context.port.portid) {
        return Err(ConnectError::invalid_host());
    }
    // A memory-based transport has no commands to authenticate with.
    if context.limits.memory_based && subsystem.host_keys.contains_key(&data.hostnqn) {
        return Err(ConnectError::invalid_host());
    }
    let is_permitted = match context.secure {
        Some(channel) => channel.permits(&data.hostnqn, &subsystem),
        // Without TLS where it is demanded, a host can only make the key of TLS that it then uses.
        None if context.port.secure => command.qid == 0 && subsystem.concatenates(&data.hostnqn),
        None => !subsystem.tls_hosts.contains_key(&data.hostnqn),
    };
    if !is_permitted {
        return Err(ConnectError::invalid_host());
    }
    if command.qid == 0 {
        connect_admin_queue(&command, &data, context, subsystem).map(ConnectOk::Admin)
    } else {
        connect_io_queue(&command, &data, context, subsystem).map(ConnectOk::Io)
    }
}

fn connect_admin_queue(
    command: &Connect,
    data: &ConnectData,
    context: &ConnectContext<'_>,
    subsystem: Arc<Subsystem>,
) -> Result<AdminConnect, ConnectError> {
    // Dynamic controller model: the target allocates the controller; the host cannot request one.
    if data.cntlid != CNTLID_DYNAMIC {
        return Err(ConnectError::invalid_parameter(true, ConnectData::CNTLID_AT).do_not_retry());
    }
    let io_queues_max = match subsystem.kind {
        SubsystemKind::Nvm => context.limits.io_queues_max,
        SubsystemKind::Discovery => 0,
    };
    // Over fabrics host identifiers have 128 bits. On a memory-based transport the host may set one later
    // (Host Identifier feature).
    let extended = if context.limits.memory_based { None } else { Some(true) };
    let requirement = AuthRequirement::of(context);
    let request = ControllerRequest {
        hostnqn: &data.hostnqn,
        host_id: data.host_id,
        extended,
        io_queues_max,
        portid: context.port.portid,
        concatenates: requirement == AuthRequirement::Concatenate,
        exclusive: context.limits.one_controller_per_listener && subsystem.kind == SubsystemKind::Nvm,
    };
    let added = context.directory.add_controller(&subsystem, request);
    let association = added.ok_or(Status::CONNECT_CONTROLLER_BUSY)?;
    let registration = DirectoryRegistration { directory: context.directory.clone(), association };
    if let Some(identity) = context.secure.and_then(|channel| channel.generated.as_deref())
        && !context.directory.use_generated_key(identity, &registration.association)
    {
        return Err(ConnectError::invalid_host());
    }
    Ok(AdminConnect {
        subsystem,
        registration,
        port: context.port.clone(),
        requirement,
        queue_entries: command.queue_entries,
        kato_ms: command.kato_ms,
        no_flow_control: command.attributes.contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL),
    })
}

fn connect_io_queue(
    command: &Connect,
    data: &ConnectData,
    context: &ConnectContext<'_>,
    subsystem: Arc<Subsystem>,
) -> Result<IoConnect, ConnectError> {
    if subsystem.kind == SubsystemKind::Discovery {
        return Err(ConnectError::invalid_parameter(false, Connect::QID_AT).do_not_retry());
    }
    let no_controller = ConnectError::invalid_parameter(true, ConnectData::CNTLID_AT);
    let association = context.directory.find(&subsystem.nqn, data.cntlid).ok_or(no_controller)?;
    // NQNs and host identifier must match those of the admin queue's Connect.
    if *association.hostnqn() != data.hostnqn {
        return Err(ConnectError::invalid_parameter(true, ConnectData::HOSTNQN_AT));
    }
    if association.host_id() != data.host_id {
        return Err(ConnectError::invalid_parameter(true, ConnectData::HOSTID_AT));
    }
    // An association with a generated key has it on all queues, and no other has it. One that is to generate
    // a key has no I/O queue, through no listener.
    if association.concatenates()
        || association.generated_identity() != context.secure.and_then(|channel| channel.generated.clone())
    {
        return Err(ConnectError::invalid_host());
    }
    let lease = association.lease(command.qid).map_err(|error| match error {
        LeaseError::ControllerGone => no_controller,
        LeaseError::OutOfRange => ConnectError::invalid_parameter(false, Connect::QID_AT).do_not_retry(),
        LeaseError::ControllerDisabled | LeaseError::InUse => Status::COMMAND_SEQUENCE_ERROR.into(),
    })?;
    Ok(IoConnect {
        lease,
        subsystem,
        requirement: AuthRequirement::of(context),
        queue_entries: command.queue_entries,
        no_flow_control: command.attributes.contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL),
    })
}

#[cfg(test)]
mod tests;
