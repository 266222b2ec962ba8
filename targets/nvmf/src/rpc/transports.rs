//! RPC methods of transports, and of faults that are injected into one.

use control::RpcError;

use super::NvmfModule;
use super::parameters::TargetName;
use crate::{TcpTransportConfig, VfioUserConfig, VfioUserFault};

control::parameters! {
    pub(super) struct CreateTransport {
        /// TCP or VFIOUSER
        trtype: String,
        tgt_name: TargetName,
        /// Entries of an I/O queue at most
        max_queue_depth: Option<u32>,
        /// I/O queues of a controller at most
        max_io_qpairs_per_ctrlr: Option<u16>,
        /// Data in a command capsule at most; TCP only
        in_capsule_data_size: Option<u32> ["bytes"],
        /// Data of a command at most
        max_io_size: Option<u32> ["bytes"],
        /// Entries of an admin queue at most; TCP only
        max_aq_depth: Option<u32>,
        /// Leave out the response capsule of a successful read; TCP only
        c2h_success: Option<bool>,
        /// Trap accesses to doorbells; VFIOUSER only
        disable_mappable_bar0: bool = false,
        /// Connections of hosts that have logged in at most; as many as file descriptors allow if not given; TCP only
        max_connections: Option<u32>,
        /// Of these, from one IP address (IPv6: from one /64 network); half of what others leave, but at
        /// least 16, if not given; TCP only
        max_connections_per_peer: Option<u32>,
        /// Of these, to one subsystem; three quarters of what others leave, but at least 16, if not given;
        /// TCP only
        max_connections_per_subsystem: Option<u32>,
        /// Connections of hosts that have not logged in at most, never more than a quarter of the file descriptors; beyond,
        /// the oldest is closed; TCP only
        max_pending_logins: Option<u32>,
        /// Of these, from one IP address (IPv6: from one /64 network); TCP only
        max_pending_logins_per_peer: Option<u32>,
        /// Buffers that one connection holds at most; TCP only
        connection_bytes_max: Option<u32> ["bytes"],
        /// Buffers that all connections of one host hold on one reactor at most; half of the reactor's share of the memory
        /// if not given; TCP only
        host_bytes_max: Option<u32> ["bytes"],
        /// Time for a host to send requested data or to read an answer; TCP only
        transfer_timeout_ms: Option<u32> ["ms"],
        /// Namespaces that are added later hide the protection information of their bdevs, as with `hide_metadata`; the same
        /// for all transports
        dif_insert_or_strip: bool = false,
    }
    only {
        disable_compare: bool = false,
        masked_oncs: Vec<String> = Vec::new(),
        masked_fuses: Vec<String> = Vec::new(),
    }
    ignored("buffers come from bounded per-core pools") {
        io_unit_size,
        num_shared_buffers,
        buf_cache_size,
        iobuf_small_cache_size,
        iobuf_large_cache_size,
        zcopy,
        control_msg_num,
    }
    ignored("the transports have fixed values") {
        sock_priority,
        acceptor_backlog,
        acceptor_poll_rate,
        ack_timeout,
        abort_timeout_sec,
        kas,
        min_kato,
        disable_command_passthru,
    }
    ignored("neither transport has them") {
        num_cqe,
        max_srq_depth,
        no_srq,
        no_wr_batching,
        data_wr_pool_size,
        disable_adaptive_irq,
        disable_shadow_doorbells,
    }
}

impl CreateTransport {
    /// Removes the options that only TCP has.
    fn remove_tcp(&mut self) {
        // Without `..`: an option that is new has to be named here.
        let CreateTransport {
            trtype: _,
            tgt_name: _,
            max_queue_depth: _,
            max_io_qpairs_per_ctrlr: _,
            max_io_size: _,
            disable_mappable_bar0: _,
            dif_insert_or_strip: _,
            in_capsule_data_size,
            max_aq_depth,
            c2h_success,
            max_connections,
            max_connections_per_peer,
            max_connections_per_subsystem,
            max_pending_logins,
            max_pending_logins_per_peer,
            connection_bytes_max,
            host_bytes_max,
            transfer_timeout_ms,
        } = self;
        *c2h_success = None;
        for option in [
            in_capsule_data_size,
            max_aq_depth,
            max_connections,
            max_connections_per_peer,
            max_connections_per_subsystem,
            max_pending_logins,
            max_pending_logins_per_peer,
            connection_bytes_max,
            host_bytes_max,
            transfer_timeout_ms,
        ] {
            *option = None;
        }
    }
}

/// The options of a transport as it uses them.
enum TransportConfig {
    Tcp(TcpTransportConfig),
    VfioUser(VfioUserConfig),
}

impl TransportConfig {
    fn of(params: &CreateTransport) -> Result<TransportConfig, RpcError> {
        match params.trtype.to_ascii_uppercase().as_str() {
            "TCP" => Ok(TransportConfig::Tcp(tcp(params))),
            "VFIOUSER" => Ok(TransportConfig::VfioUser(vfio_user(params))),
            _ => {
                let message =
                    format!("transport {} is not supported; expected TCP or VFIOUSER", params.trtype);
                Err(RpcError::invalid_params(message))
            }
        }
    }
}

pub(super) fn create_transport(module: &NvmfModule, params: CreateTransport) -> Result<bool, RpcError> {
    let config = TransportConfig::of(&params)?;
    module.target.check_hides_metadata(params.dif_insert_or_strip)?;
    match config {
        TransportConfig::Tcp(config) => module.target.create_transport(config)?,
        TransportConfig::VfioUser(config) => {
            if params.in_capsule_data_size.is_some() || params.max_aq_depth.is_some() {
                log::warn!(
                    target: "nvmf",
                    "nvmf_create_transport: in_capsule_data_size, max_aq_depth ignored: queues are in the client's memory"
                );
            }
            module.target.create_vfio_user(config)?;
        }
    }
    module.target.set_hides_metadata(params.dif_insert_or_strip);
    Ok(true)
}

/// With all options that the transport has, and without those of the other one.
pub(super) fn canonical_transport(_: &NvmfModule, params: &mut CreateTransport) -> Result<(), RpcError> {
    let config = TransportConfig::of(params)?;
    params.trtype.make_ascii_uppercase();
    match config {
        TransportConfig::Tcp(config) => {
            params.max_queue_depth = Some(config.max_queue_depth);
            params.max_io_qpairs_per_ctrlr = Some(config.max_io_qpairs_per_ctrlr);
            params.in_capsule_data_size = Some(config.in_capsule_data_size);
            params.max_io_size = Some(config.max_io_size);
            params.max_aq_depth = Some(config.max_aq_depth);
            params.c2h_success = Some(config.c2h_success);
            params.max_pending_logins = Some(config.max_pending_logins);
            params.max_pending_logins_per_peer = Some(config.max_pending_logins_per_peer);
            params.connection_bytes_max = Some(config.connection_bytes_max);
            params.transfer_timeout_ms = Some(config.transfer_timeout_ms);
            params.disable_mappable_bar0 = false;
        }
        TransportConfig::VfioUser(config) => {
            params.max_queue_depth = Some(config.max_queue_depth);
            params.max_io_qpairs_per_ctrlr = Some(config.max_io_qpairs_per_ctrlr);
            params.max_io_size = Some(config.max_io_size);
            params.remove_tcp();
        }
    }
    Ok(())
}

fn tcp(params: &CreateTransport) -> TcpTransportConfig {
    let mut config = TcpTransportConfig::default();
    config.max_queue_depth = params.max_queue_depth.unwrap_or(config.max_queue_depth);
    config.max_io_qpairs_per_ctrlr = params.max_io_qpairs_per_ctrlr.unwrap_or(config.max_io_qpairs_per_ctrlr);
    config.in_capsule_data_size = params.in_capsule_data_size.unwrap_or(config.in_capsule_data_size);
    config.max_io_size = params.max_io_size.unwrap_or(config.max_io_size);
    config.max_aq_depth = params.max_aq_depth.unwrap_or(config.max_aq_depth);
    config.c2h_success = params.c2h_success.unwrap_or(config.c2h_success);
    config.max_connections = params.max_connections;
    config.max_connections_per_peer = params.max_connections_per_peer;
    config.max_connections_per_subsystem = params.max_connections_per_subsystem;
    config.max_pending_logins = params.max_pending_logins.unwrap_or(config.max_pending_logins);
    config.max_pending_logins_per_peer =
        params.max_pending_logins_per_peer.unwrap_or(config.max_pending_logins_per_peer);
    config.host_bytes_max = params.host_bytes_max;
    config.connection_bytes_max = params.connection_bytes_max.unwrap_or(config.connection_bytes_max);
    config.transfer_timeout_ms = params.transfer_timeout_ms.unwrap_or(config.transfer_timeout_ms);
    config
}

fn vfio_user(params: &CreateTransport) -> VfioUserConfig {
    let mut config = VfioUserConfig::default();
    config.max_queue_depth = params.max_queue_depth.unwrap_or(config.max_queue_depth);
    config.max_io_qpairs_per_ctrlr = params.max_io_qpairs_per_ctrlr.unwrap_or(config.max_io_qpairs_per_ctrlr);
    config.max_io_size = params.max_io_size.unwrap_or(config.max_io_size);
    config.disable_mappable_bar0 = params.disable_mappable_bar0;
    config
}

control::choices! {
    enum FaultName {
        None = "none",
        Fatal = "fatal",
        Gone = "gone",
        Disconnect = "disconnect",
        DropCompletions = "drop_completions",
        Stall = "stall",
    }
}

control::parameters! {
    pub(super) struct InjectVfioUserFault {
        /// Directory of the listener
        traddr: String,
        /// What fails
        fault: FaultName,
        /// How many completions drop_completions drops; without, 1
        count: Option<u32>,
        /// Which queue stalls
        qid: Option<u16>,
    }
}

pub(super) fn inject(module: &NvmfModule, params: InjectVfioUserFault) -> Result<bool, RpcError> {
    let fault = match (params.fault, params.count, params.qid) {
        (FaultName::None, None, None) => VfioUserFault::None,
        (FaultName::Fatal, None, None) => VfioUserFault::Fatal,
        (FaultName::Gone, None, None) => VfioUserFault::SurpriseRemoval,
        (FaultName::Disconnect, None, None) => VfioUserFault::Disconnect,
        (FaultName::DropCompletions, count, None) => VfioUserFault::DropCompletions(count.unwrap_or(1)),
        (FaultName::Stall, None, Some(qid)) => VfioUserFault::Stall(qid),
        _ => {
            let message = "count belongs to the fault drop_completions, and qid to stall, which needs it";
            return Err(RpcError::invalid_params(message));
        }
    };
    module.target.inject(&params.traddr, fault)?;
    Ok(true)
}
