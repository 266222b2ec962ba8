//! The module of the target for the control plane: the methods `iscsi_*` and `scsi_get_devices`.

mod auth;
mod groups;
mod nodes;

use std::sync::Arc;

use bdev::Registry;
use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError};
use reactor::ReactorHandle;

use crate::config::IscsiOptions;
use crate::{IscsiTarget, IscsiTargetError};

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

impl Module for IscsiModule {
    const NAME: &'static str = "iscsi";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<IscsiModule>> {
        let mut methods = vec![
            Method::update("iscsi_set_options", set_options)
                .at_any_stage()
                .text("Sets what all target nodes share. Sessions that exist keep their parameters.", "true")
                .errors(&[INVALID, UNRESPONSIVE]),
            Method::query("iscsi_get_options", |module: &IscsiModule, _: NoParameters| {
                let mut options = describe_options(&module.target.options());
                options["error_recovery_level"] = json!(0);
                auth::add_policy(&mut options, module.target.discovery_auth());
                Ok::<_, RpcError>(options)
            })
            .text("Returns the options.", "the parameters of `iscsi_set_options` that have an effect"),
            Method::query("iscsi_get_stats", |module: &IscsiModule, _: NoParameters| {
                let counts = module.target.connection_counts()?;
                Ok::<_, RpcError>(json!({
                    "invalid": counts.logging_in,
                    "running": counts.running,
                    "exiting": counts.draining,
                    "exited": counts.closed,
                }))
            })
            .text(
                "Counts connections.",
                "`invalid`: not logged in; `running`: logged in; `exiting`: complete what is in flight; `exited`: \
                 closed, with requests to bdevs in flight",
            )
            .errors(&[UNRESPONSIVE]),
            Method::query("iscsi_get_connections", connections)
                .text(
                    "Describes the connections whose initiators have logged in.",
                    "array of connections with `id`, `cid`, `tsih`, `lcore_id`, `initiator_addr`, \
                     `target_node_name`, and, not in SPDK, `initiator_name`, `isid`, `pg_tag` and the digests",
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
        /// As `iscsi_set_discovery_auth`; without one of these four its setting stays
        disable_chap: Option<bool>,
        /// As `iscsi_set_discovery_auth`
        require_chap: Option<bool>,
        /// As `iscsi_set_discovery_auth`
        mutual_chap: Option<bool>,
        /// As `iscsi_set_discovery_auth`
        chap_group: Option<u32>,
    }
    only { error_recovery_level: u32 = 0, auth_file: String = String::new() }
    one_of { allow_duplicated_isid: bool = [false, true] }
    ignored("sessions have no common limit, and commands are limited by the queue depth of their target node") {
        max_sessions, max_queue_depth, default_time2wait, default_time2retain,
        max_large_datain_per_connection, max_r2t_per_connection, pdu_pool_size, immediate_data_pool_size,
        data_out_pool_size
    }
}

fn set_options(module: &IscsiModule, params: SetOptions) -> Result<bool, RpcError> {
    let mut options = module.target.options();
    if let Some(node_base) = params.node_base {
        options.node_base = node_base;
    }
    options.nop_timeout_s = params.nop_timeout.unwrap_or(options.nop_timeout_s);
    options.nop_in_interval_s = params.nop_in_interval.unwrap_or(options.nop_in_interval_s);
    options.first_burst_bytes = params.first_burst_length.unwrap_or(options.first_burst_bytes);
    options.immediate_data = params.immediate_data.unwrap_or(options.immediate_data);
    options.connections_max = params.max_connections_per_session.unwrap_or(options.connections_max);
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
    json!({
        "node_base": options.node_base,
        "nop_timeout": options.nop_timeout_s,
        "nop_in_interval": options.nop_in_interval_s,
        "first_burst_length": options.first_burst_bytes,
        "immediate_data": options.immediate_data,
        "max_connections_per_session": options.connections_max,
    })
}

fn connections(module: &IscsiModule, _: NoParameters) -> Result<Vec<Value>, RpcError> {
    let describe = |(id, one): (usize, crate::ConnectionInfo)| {
        json!({
            "id": id,
            "cid": one.cid,
            "tsih": one.tsih,
            "lcore_id": one.core,
            "initiator_addr": one.peer.tcp().map_or_else(String::new, |address| address.ip().to_string()),
            "target_node_name": one.node.unwrap_or_default(),
            "initiator_name": one.initiator,
            "isid": format!("{:012x}", one.isid),
            "pg_tag": one.portal_group,
            "header_digest": one.header_digest,
            "data_digest": one.data_digest,
        })
    };
    Ok(module.target.connections()?.into_iter().enumerate().map(describe).collect())
}
