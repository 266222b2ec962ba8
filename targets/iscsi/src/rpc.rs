//! The module of the target for the control plane: the methods `iscsi_*`.

mod auth;
mod groups;
mod nodes;

use std::sync::Arc;

use bdev::Registry;
use control::json::{Value, json};
use control::{BalancedTarget, Method, Metric, MetricSamples, Module, NoParameters, RpcError, thread_name};
use reactor::ReactorHandle;
use scsi::{ScsiDeviceOwner, ScsiDeviceSource};
use wire_iscsi::LoginStage;

use crate::config::IscsiOptions;
use crate::{ConnectionInfo, IscsiTarget, IscsiTargetError};

/// The iSCSI target as a [`Module`].
pub struct IscsiModule {
    target: IscsiTarget,
}

impl IscsiModule {
    /// A target without portals on `reactors`, for the devices of `registry`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<IscsiModule> {
        Arc::new(IscsiModule { target: IscsiTarget::new(registry, reactors) })
    }

    /// The target.
    pub fn target(&self) -> &IscsiTarget {
        &self.target
    }
}

pub(super) const UNRESPONSIVE: (i64, &str) =
    (RpcError::ETIMEDOUT, "a reactor does not respond; nothing was changed");
pub(super) const INVALID: (i64, &str) = (RpcError::INVALID_PARAMS, "a parameter is invalid");

impl IscsiModule {
    /// The target nodes, as SCSI devices.
    pub fn scsi_devices(&self) -> ScsiDeviceSource {
        let target = self.target.clone();
        Box::new(move || {
            target.nodes().into_iter().map(|node| ScsiDeviceOwner::TargetNode(node.name)).collect()
        })
    }
}

impl Module for IscsiModule {
    const NAME: &'static str = "iscsi";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<IscsiModule>> {
        let mut methods = vec![
            Method::update("iscsi_set_options", set_options)
                .at_any_stage()
                .text("Sets what all target nodes share. Sessions that exist keep their parameters.", "true")
                .assigns(&[
                    "node_base",
                    "nop_timeout",
                    "nop_in_interval",
                    "first_burst_length",
                    "immediate_data",
                    "max_connections_per_session",
                    "max_connections",
                    "max_connections_per_peer",
                    "max_connections_per_node",
                    "max_sessions",
                    "max_queue_depth",
                    "default_time2wait",
                    "max_large_datain_per_connection",
                    "max_r2t_per_connection",
                    "pdu_pool_size",
                    "immediate_data_pool_size",
                    "data_out_pool_size",
                ])
                // What is set without any of them is the default of these.
                .canonical(|_: &IscsiModule, params: &mut SetOptions| {
                    for switch in [&mut params.disable_chap, &mut params.require_chap, &mut params.mutual_chap] {
                        *switch = switch.filter(|is_on| *is_on);
                    }
                    params.chap_group = params.chap_group.filter(|tag| *tag != 0);
                    Ok(())
                })
                .errors(&[INVALID, UNRESPONSIVE]),
            Method::query("iscsi_get_options", |module: &IscsiModule, _: NoParameters| {
                let mut options = describe_options(&module.target.options());
                for (name, fixed) in [
                    ("default_time2retain", json!(0)),
                    ("allow_duplicated_isid", json!(false)),
                    ("error_recovery_level", json!(0)),
                ] {
                    options[name] = fixed;
                }
                auth::add_policy(&mut options, module.target.discovery_auth());
                Ok::<_, RpcError>(options)
            })
            .text("Returns the options.", "the parameters of `iscsi_set_options`, but for `auth_file`; `default_time2retain`, \
                 `allow_duplicated_isid` and `error_recovery_level` are as they are always"),
            Method::query("iscsi_get_stats", |module: &IscsiModule, _: NoParameters| {
                let counts = module.target.connection_counts()?;
                Ok::<_, RpcError>(json!({
                    "peers": module.target.peers(),
                    "invalid": counts.logging_in,
                    "running": counts.running,
                    "exiting": counts.draining,
                    "exited": counts.closed,
                }))
            })
            .text(
                "Counts connections.",
                "`invalid`: not logged in; `running`: logged in; `exiting`: complete what is in flight; `exited`: \
                 closed, with requests to bdevs in flight; and, not in SPDK, `peers`: by address of the initiators that \
                 have logged in, `connections`, and `connections_max`, which it may have while others have theirs",
            )
            .errors(&[UNRESPONSIVE]),
            Method::query("iscsi_get_connections", connections)
                .text(
                    "Describes the connections.",
                    "array of connections with `id`, `cid`, `tsih` (65535 until the initiator has logged in), `state` \
                     (invalid during the login, running, exiting), `login_phase`, `initiator_addr`, `target_addr`, \
                     `target_node_name` (what follows the first colon of its name), `thread_name`, and, not in SPDK, `lcore_id` (the CPU), `initiator_name`, `isid`, \
                     `pg_tag` and the digests",
                )
                .errors(&[UNRESPONSIVE]),
        ];
        methods.extend(auth::methods());
        methods.extend(groups::methods());
        methods.extend(nodes::methods());
        methods
    }

    fn drain(&self) {
        self.target.shutdown();
    }

    fn stop(&self) {
        self.target.close();
    }

    fn save(&self) -> Vec<Value> {
        let options = self.target.options();
        let mut calls = Vec::new();
        if options != IscsiOptions::default() {
            calls.push(json!({ "method": "iscsi_set_options", "params": describe_options(&options) }));
        }
        calls.extend(auth::save(self));
        calls.extend(groups::save(self));
        calls.extend(nodes::save(self));
        calls
    }

    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        self.target.balanced().into_iter().collect()
    }

    fn metrics() -> Vec<&'static Metric> {
        target_shell::connection_metrics()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        target_shell::collect_connections("iscsi", self.target.connection_totals(), samples);
    }

    fn report(&self) -> Value {
        json!({
            "portal_groups": self.target.portal_groups().len(),
            "target_nodes": self.target.nodes().len(),
        })
    }
}

impl From<IscsiTargetError> for RpcError {
    fn from(error: IscsiTargetError) -> RpcError {
        let code = match &error {
            IscsiTargetError::Bdev(bdev::BdevError::NotFound { .. }) | IscsiTargetError::NotFound(_) => {
                RpcError::ENODEV
            }
            IscsiTargetError::Exists(_) => RpcError::EEXIST,
            IscsiTargetError::Invalid(_) => RpcError::INVALID_PARAMS,
            IscsiTargetError::TooMany(_) => RpcError::ENOSPC,
            IscsiTargetError::NotApplied(_)
            | IscsiTargetError::Shell(target_shell::ShellError::Unresponsive(_)) => RpcError::ETIMEDOUT,
            IscsiTargetError::Bdev(_)
            | IscsiTargetError::Reservations(_)
            | IscsiTargetError::Shell(_)
            | IscsiTargetError::Stopping => RpcError::INTERNAL,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct SetOptions {
        /// What precedes the name of a target node that is no iSCSI name
        node_base: Option<String>,
        /// Time without an answer to a ping after which a connection is closed; 0 is never
        nop_timeout: Option<u32> ["seconds"],
        /// Silence after which an initiator is pinged; 0 is never
        nop_in_interval: Option<u32> ["seconds"],
        /// Most data that comes with a command or unasked, 512 to 65536
        first_burst_length: Option<u32> ["bytes"],
        /// Accept data that comes with a command
        immediate_data: Option<bool>,
        /// Connections of a session, 1 to 64; initiators ask for them by MaxConnections
        max_connections_per_session: Option<u32>,
        /// Sessions of the target, those of discovery included, 1 to 65535; 1,024 without this method
        max_sessions: Option<u32>,
        /// Connections of initiators that have logged in, 1 to 16384; 1,024 without this method. Not in SPDK,
        /// as the next two
        max_connections: Option<u32>,
        /// Of these, from one IP address (IPv6: from one /64 network); half of what others leave, but at
        /// least 16, without this method
        max_connections_per_peer: Option<u32>,
        /// Of these, to one target node; three quarters of what others leave, but at least 16, without this
        /// method
        max_connections_per_node: Option<u32>,
        /// Commands of a session in flight, at most, 1 to 256; those of a target node are fewer if its
        /// `queue_depth` is
        max_queue_depth: Option<u32>,
        /// Least DefaultTime2Wait that a login results in, up to 3600
        default_time2wait: Option<u32> ["seconds"],
        /// From 1; without effect, as are those below: the memory of each connection has a limit of its own
        max_large_datain_per_connection: Option<u32>,
        /// From 1; without effect
        max_r2t_per_connection: Option<u32>,
        /// From 1; without effect
        pdu_pool_size: Option<u32>,
        /// From 1; without effect
        immediate_data_pool_size: Option<u32>,
        /// From 1; without effect
        data_out_pool_size: Option<u32>,
        /// As `iscsi_set_discovery_auth`; without one of these four its setting stays
        disable_chap: Option<bool>,
        /// As `iscsi_set_discovery_auth`
        require_chap: Option<bool>,
        /// As `iscsi_set_discovery_auth`
        mutual_chap: Option<bool>,
        /// As `iscsi_set_discovery_auth`
        chap_group: Option<u32>,
    }
    only("errors end the connection or the session") { error_recovery_level: u32 = 0 }
    only("secrets come from iscsi_create_auth_group") { auth_file: String = String::new() }
    only("a login with the ISID of a session replaces it") { allow_duplicated_isid: bool = false }
    one_of("sessions are not retained without a connection") { default_time2retain: u32 = [0, 20] }
}

fn set_options(module: &IscsiModule, params: SetOptions) -> Result<bool, RpcError> {
    let mut options = module.target.options();
    if let Some(node_base) = params.node_base {
        options.node_base = node_base;
    }
    options.immediate_data = params.immediate_data.unwrap_or(options.immediate_data);
    let pools = &mut options.pools;
    for (option, given) in [
        (&mut options.nop_timeout_s, params.nop_timeout),
        (&mut options.nop_in_interval_s, params.nop_in_interval),
        (&mut options.first_burst_bytes, params.first_burst_length),
        (&mut options.connections_max, params.max_connections_per_session),
        (&mut options.sessions_max, params.max_sessions),
        (&mut options.queue_depth_max, params.max_queue_depth),
        (&mut options.time2wait_s, params.default_time2wait),
        (&mut options.limits.max, params.max_connections),
        (&mut pools.large_data_ins, params.max_large_datain_per_connection),
        (&mut pools.r2ts, params.max_r2t_per_connection),
        (&mut pools.pdus, params.pdu_pool_size),
        (&mut pools.immediate_data_buffers, params.immediate_data_pool_size),
        (&mut pools.data_out_buffers, params.data_out_pool_size),
    ] {
        *option = given.unwrap_or(*option);
    }
    let limits = &mut options.limits;
    limits.per_peer_max = params.max_connections_per_peer.or(limits.per_peer_max);
    limits.per_object_max = params.max_connections_per_node.or(limits.per_object_max);
    let SetOptions { disable_chap, require_chap, mutual_chap, chap_group, .. } = params;
    let switches = [disable_chap, require_chap, mutual_chap];
    if switches.iter().any(Option::is_some) || chap_group.is_some() {
        let [disabled, required, mutual] = switches.map(|switch| switch.unwrap_or(false));
        let policy = auth::policy(disabled, required, mutual, chap_group.unwrap_or(0));
        module.target.set_discovery_auth(None, policy)?;
    }
    module.target.set_options(options)?;
    Ok(true)
}

fn describe_options(options: &IscsiOptions) -> Value {
    let mut value = json!({
        "node_base": options.node_base,
        "nop_timeout": options.nop_timeout_s,
        "nop_in_interval": options.nop_in_interval_s,
        "first_burst_length": options.first_burst_bytes,
        "immediate_data": options.immediate_data,
        "max_connections_per_session": options.connections_max,
        "max_sessions": options.sessions_max,
        "max_queue_depth": options.queue_depth_max,
        "default_time2wait": options.time2wait_s,
        "max_large_datain_per_connection": options.pools.large_data_ins,
        "max_r2t_per_connection": options.pools.r2ts,
        "pdu_pool_size": options.pools.pdus,
        "immediate_data_pool_size": options.pools.immediate_data_buffers,
        "data_out_pool_size": options.pools.data_out_buffers,
    });
    for (name, limit) in options.limits.named("node") {
        value[name] = json!(limit);
    }
    value
}

/// SPDK's name of a connection's state.
fn state(connection: &ConnectionInfo) -> &'static str {
    match connection.tsih {
        _ if connection.is_draining => "exiting",
        Some(_) => "running",
        None => "invalid",
    }
}

/// SPDK's name of a stage of the login.
fn login_phase(stage: LoginStage) -> &'static str {
    match stage {
        LoginStage::Security => "security_negotiation_phase",
        LoginStage::Operational => "operational_negotiation_phase",
        LoginStage::FullFeature => "full_feature_phase",
    }
}

/// SPDK's short name of a target node: what follows the first colon of its name, or all of it.
fn short_name(name: &str) -> &str {
    name.split_once(':').map_or(name, |(_, short)| short)
}

fn connections(module: &IscsiModule, _: NoParameters) -> Result<Vec<Value>, RpcError> {
    let describe = |(id, one): (usize, ConnectionInfo)| {
        json!({
            "id": id,
            "cid": one.cid,
            // As SPDK's, whose -1 becomes a u16.
            "tsih": one.tsih.unwrap_or(u16::MAX),
            "state": state(&one),
            "login_phase": login_phase(one.stage),
            "initiator_addr": one.peer.tcp().map_or_else(String::new, |address| address.ip().to_string()),
            "target_addr": one.local.map_or_else(String::new, |address| address.ip().to_string()),
            "thread_name": thread_name(one.core),
            "lcore_id": one.cpu,
            "target_node_name": one.node.as_deref().map_or("", short_name),
            "initiator_name": one.initiator,
            "isid": format!("{:012x}", one.isid),
            "pg_tag": one.portal_group,
            "header_digest": one.header_digest,
            "data_digest": one.data_digest,
        })
    };
    Ok(module.target.connections()?.into_iter().enumerate().map(describe).collect())
}

#[cfg(test)]
mod tests {
    use super::short_name;

    #[test]
    fn the_short_name_follows_the_first_colon() {
        let names = ["iqn.2016-06.io.spdk:disk1", "iqn.2016-06.io.spdk:a:b", "iqn.2016-06.io.spdk", "disk1"];
        assert_eq!(names.map(short_name), ["disk1", "a:b", "iqn.2016-06.io.spdk", "disk1"]);
    }
}
